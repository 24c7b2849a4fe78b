"""PyTorch's definition of YOLOv5, from the same table of layers, with the names of its weights."""

import torch
from torch import nn
from torch.nn import functional

from fedjax_bn.models.yolo import ANCHORS


class Convolution(nn.Module):
    def __init__(self, inputs, outputs, kernel=1, stride=1, padding=None):
        super().__init__()
        padding = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03)

    def forward(self, x):
        return functional.silu(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, width, shortcut):
        super().__init__()
        self.cv1, self.cv2 = Convolution(width, width), Convolution(width, width, 3)
        self.shortcut = shortcut

    def forward(self, x):
        y = self.cv2(self.cv1(x))
        return x + y if self.shortcut else y


class CrossStage(nn.Module):
    def __init__(self, inputs, outputs, repeats, shortcut=True):
        super().__init__()
        half = outputs // 2
        self.cv1, self.cv2 = Convolution(inputs, half), Convolution(inputs, half)
        self.cv3 = Convolution(2 * half, outputs)
        self.m = nn.Sequential(*(Bottleneck(half, shortcut) for _ in range(repeats)))

    def forward(self, x):
        return self.cv3(torch.cat([self.m(self.cv1(x)), self.cv2(x)], 1))


class Pyramid(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.cv1 = Convolution(inputs, inputs // 2)
        self.cv2 = Convolution(inputs // 2 * 4, outputs)

    def forward(self, x):
        maps = [self.cv1(x)]
        for _ in range(3):
            maps.append(functional.max_pool2d(maps[-1], 5, 1, 2))
        return self.cv2(torch.cat(maps, 1))


class Head(nn.Module):
    def __init__(self, widths, classes):
        super().__init__()
        self.m = nn.ModuleList(nn.Conv2d(width, 3 * (5 + classes), 1) for width in widths)
        sizes = torch.tensor(ANCHORS.sizes, dtype=torch.float32)
        self.register_buffer("anchors", sizes / torch.tensor(ANCHORS.strides)[:, None, None])


class YOLOv5(nn.Module):
    """Of widths 8 w, 16 w, ...; `again` are the bottlenecks of a nominal 3."""

    def __init__(self, classes=80, w=2, again=(1, 2, 3, 1, 1)):
        super().__init__()
        c = [8 * w * 2**i for i in range(5)]
        first, second, third, fourth, neck = again
        layers = {
            0: Convolution(3, c[0], 6, 2, 2),
            1: Convolution(c[0], c[1], 3, 2),
            2: CrossStage(c[1], c[1], first),
            3: Convolution(c[1], c[2], 3, 2),
            4: CrossStage(c[2], c[2], second),
            5: Convolution(c[2], c[3], 3, 2),
            6: CrossStage(c[3], c[3], third),
            7: Convolution(c[3], c[4], 3, 2),
            8: CrossStage(c[4], c[4], fourth),
            9: Pyramid(c[4], c[4]),
            10: Convolution(c[4], c[3]),
            13: CrossStage(2 * c[3], c[3], neck, False),
            14: Convolution(c[3], c[2]),
            17: CrossStage(2 * c[2], c[2], neck, False),
            18: Convolution(c[2], c[2], 3, 2),
            20: CrossStage(2 * c[2], c[3], neck, False),
            21: Convolution(c[3], c[3], 3, 2),
            23: CrossStage(2 * c[3], c[4], neck, False),
            24: Head(c[2:], classes),
        }
        self.model = nn.ModuleList(layers.get(i, nn.Identity()) for i in range(25))

    def forward(self, images):
        """Images [B, 3, H, W] -> three times [B, H / stride, W / stride, 3, 5 + classes]."""
        layer, seen = self.model, {}
        x = images
        for i in range(11):
            x = seen[i] = layer[i](x)
        x = torch.cat([functional.interpolate(seen[10], scale_factor=2.0), seen[6]], 1)
        seen[14] = layer[14](layer[13](x))
        x = torch.cat([functional.interpolate(seen[14], scale_factor=2.0), seen[4]], 1)
        seen[17] = layer[17](x)
        seen[20] = layer[20](torch.cat([layer[18](seen[17]), seen[14]], 1))
        seen[23] = layer[23](torch.cat([layer[21](seen[20]), seen[10]], 1))
        outputs = []
        for predict, i in zip(layer[24].m, (17, 20, 23), strict=True):
            y = predict(seen[i]).permute(0, 2, 3, 1)
            outputs.append(y.reshape(*y.shape[:3], 3, -1))
        return outputs


def detection_loss(outputs, boxes, classes, anchors=ANCHORS, scaled=True):
    """The usual loss, of the matches alone: boxes [B, M, 4] in [0, 1], classes [B, M] or -1.

    Without `scaled` its gains do not follow the area and the number of classes.
    """
    image, which = torch.nonzero(classes >= 0, as_tuple=True)
    corners, number = boxes[image, which], classes[image, which]
    balances = (4.0, 1.0, 0.4)
    box = objectness = category = 0.0
    for out, sizes, stride, balance in zip(outputs, *anchors, balances, strict=False):
        inside = out.new_tensor(sizes) / stride
        size = out.new_tensor([out.shape[2], out.shape[1]])
        centre = (corners[:, :2] + corners[:, 2:]) / 2 * size
        side = (corners[:, 2:] - corners[:, :2]) * size
        quotient = side[:, None] / inside
        n, a = torch.nonzero(torch.maximum(quotient, 1 / quotient).amax(-1) < 4, as_tuple=True)
        left, right = centre[n], size - centre[n]
        before = (left % 1 < 0.5) & (left > 1)
        after = (right % 1 < 0.5) & (right % 1 > 0) & (right > 1)
        here = torch.ones_like(n, dtype=torch.bool)[:, None]
        m, step = torch.nonzero(torch.cat([here, before, after], 1), as_tuple=True)
        steps = torch.tensor([[0, 0], [-1, 0], [0, -1], [1, 0], [0, 1]])[step]
        cell = (left[m].floor().long() + steps).clamp(min=0).minimum(size.long() - 1)
        i, a, n = image[n[m]], a[m], n[m]
        found = out[i, cell[:, 1], cell[:, 0], a]
        squeezed = 2 * torch.sigmoid(found[:, :4])
        guess = torch.cat([squeezed[:, :2] - 0.5, squeezed[:, 2:] ** 2 * inside[a]], 1)
        overlap = _ciou(guess, torch.cat([centre[n] - cell, side[n]], 1))
        box = box + (1 - overlap).mean()
        place = ((i * out.shape[1] + cell[:, 1]) * out.shape[2] + cell[:, 0]) * out.shape[3] + a
        target = torch.zeros_like(out[..., 4]).flatten()
        target = target.scatter_reduce(0, place, overlap.detach().clamp(min=0), "amax")
        bce = functional.binary_cross_entropy_with_logits
        objectness = objectness + balance * bce(out[..., 4].flatten(), target)
        count = out.shape[-1] - 5
        hot = functional.one_hot(number[n], count).to(out.dtype)
        category = category + (bce(found[:, 5:], hot) if count > 1 else 0)
    height, width = (outputs[0].shape[axis] * anchors.strides[0] for axis in (1, 2))
    by_area, by_class = (height * width / 640**2, count / 80) if scaled else (1, 1)
    total = 0.05 * box + by_area * objectness + 0.5 * by_class * category
    return total * len(outputs[0])


def _ciou(one, other):
    low, high = one[:, :2] - one[:, 2:] / 2, one[:, :2] + one[:, 2:] / 2
    lower, higher = other[:, :2] - other[:, 2:] / 2, other[:, :2] + other[:, 2:] / 2
    both = (torch.minimum(high, higher) - torch.maximum(low, lower)).clamp(min=0).prod(1)
    iou = both / (one[:, 2:].prod(1) + other[:, 2:].prod(1) - both)
    diagonal = (torch.maximum(high, higher) - torch.minimum(low, lower)).square().sum(1)
    distance = (one[:, :2] - other[:, :2]).square().sum(1)
    angles = [torch.atan(box[:, 2] / box[:, 3]) for box in (one, other)]
    v = 4 / torch.pi**2 * (angles[1] - angles[0]).square()
    with torch.no_grad():
        a = v / (v - iou + 1 + 1e-7)
    return iou - distance / diagonal - a * v
