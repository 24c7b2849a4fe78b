"""PyTorch's definitions of the networks, with the names of torchvision and of FedBN's code."""

import torch
from torch import nn
from torch.nn import functional


class DigitCNN(nn.Module):
    def __init__(self, num_classes=10, hidden=(2048, 512), width=64):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 5, 1, 2), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 5, 1, 2), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 2 * width, 5, 1, 2), nn.BatchNorm2d(2 * width)
        self.fc1, self.bn4 = nn.Linear(2 * width * 7 * 7, hidden[0]), nn.BatchNorm1d(hidden[0])
        self.fc2, self.bn5 = nn.Linear(*hidden), nn.BatchNorm1d(hidden[1])
        self.fc3 = nn.Linear(hidden[1], num_classes)

    def forward(self, x):
        x = functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 2)
        x = functional.max_pool2d(torch.relu(self.bn2(self.conv2(x))), 2)
        x = torch.relu(self.bn3(self.conv3(x))).flatten(1)
        x = torch.relu(self.bn4(self.fc1(x)))
        x = torch.relu(self.bn5(self.fc2(x)))
        return x, self.fc3(x)


class AlexNet(nn.Module):
    def __init__(self, num_classes=10, hidden=(4096, 4096)):
        super().__init__()
        self.features = nn.Sequential()
        self.classifier = nn.Sequential()
        convs = ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
        width = 3
        for i, (out, kernel, stride, padding) in enumerate(convs, start=1):
            self.features.add_module(f"conv{i}", nn.Conv2d(width, out, kernel, stride, padding))
            self.features.add_module(f"bn{i}", nn.BatchNorm2d(out))
            self.features.add_module(f"relu{i}", nn.ReLU())
            if i in (1, 2, 5):
                self.features.add_module(f"maxpool{i}", nn.MaxPool2d(3, 2))
            width = out
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        width = 256 * 6 * 6
        for i, out in enumerate(hidden, start=1):
            self.classifier.add_module(f"fc{i}", nn.Linear(width, out))
            self.classifier.add_module(f"bn{i + 5}", nn.BatchNorm1d(out))
            self.classifier.add_module(f"relu{i + 5}", nn.ReLU())
            width = out
        self.classifier.add_module("fc3", nn.Linear(width, num_classes))

    def forward(self, x):
        x = self.avgpool(self.features(x)).flatten(1)
        x = self.classifier[:-1](x)
        return x, self.classifier[-1](x)


class MLP(nn.Module):
    def __init__(self, inputs=5995, num_classes=2):
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(inputs, 16), nn.BatchNorm1d(16)
        self.fc2, self.bn2 = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.fc3 = nn.Linear(16, num_classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.fc1(x)))
        x = torch.relu(self.bn2(self.fc2(x)))
        return x, self.fc3(x)


def downsample(inputs, out, stride):
    return nn.Sequential(nn.Conv2d(inputs, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        same = stride == 1 and inputs == width
        self.downsample = None if same else downsample(inputs, width, stride)

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + shortcut)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs, width, stride):
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        same = stride == 1 and inputs == out
        self.downsample = None if same else downsample(inputs, out, stride)

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + shortcut)


class ResNet(nn.Module):
    def __init__(self, block, stage_sizes, width=64, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.stages = len(stage_sizes)
        inputs = width
        for i, size in enumerate(stage_sizes):
            blocks = []
            for j in range(size):
                blocks.append(block(inputs, width * 2**i, 2 if i > 0 and j == 0 else 1))
                inputs = width * 2**i * block.expansion
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x):
        x = functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for i in range(self.stages):
            x = getattr(self, f"layer{i + 1}")(x)
        x = functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return x, self.fc(x)


class DenseLayer(nn.Module):
    def __init__(self, inputs, growth):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)

    def forward(self, x):
        y = self.conv1(torch.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(torch.relu(self.norm2(y)))], 1)


class Transition(nn.Sequential):
    def __init__(self, inputs):
        super().__init__()
        self.add_module("norm", nn.BatchNorm2d(inputs))
        self.add_module("relu", nn.ReLU())
        self.add_module("conv", nn.Conv2d(inputs, inputs // 2, 1, bias=False))
        self.add_module("pool", nn.AvgPool2d(2, 2))


class DenseNet(nn.Module):
    def __init__(self, block_sizes, growth=32, width=64, num_classes=10):
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, width, 7, 2, 3, bias=False))
        self.features.add_module("norm0", nn.BatchNorm2d(width))
        self.features.add_module("relu0", nn.ReLU())
        self.features.add_module("pool0", nn.MaxPool2d(3, 2, 1))
        for i, size in enumerate(block_sizes, start=1):
            block = nn.Sequential()
            for j in range(1, size + 1):
                block.add_module(f"denselayer{j}", DenseLayer(width, growth))
                width += growth
            self.features.add_module(f"denseblock{i}", block)
            if i < len(block_sizes):
                self.features.add_module(f"transition{i}", Transition(width))
                width //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(width))
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, x):
        x = functional.adaptive_avg_pool2d(torch.relu(self.features(x)), 1).flatten(1)
        return x, self.classifier(x)


class UNet(nn.Module):
    """With the names of mateuszbuda/brain-segmentation-pytorch."""

    def __init__(self, num_classes, width, levels, inputs=3):
        super().__init__()
        self.levels, channels = levels, [width * 2**i for i in range(levels + 1)]
        for i in range(levels):
            self.add_module(f"encoder{i + 1}", block(inputs, channels[i], f"enc{i + 1}"))
            inputs = channels[i]
        self.bottleneck = block(inputs, channels[-1], "bottleneck")
        for i in range(levels):
            up = nn.ConvTranspose2d(channels[i + 1], channels[i], 2, 2)
            self.add_module(f"upconv{i + 1}", up)
            down = block(2 * channels[i], channels[i], f"dec{i + 1}")
            self.add_module(f"decoder{i + 1}", down)
        self.conv = nn.Conv2d(width, num_classes, 1)

    def forward(self, x, mask=1):
        """The map that the last layer reads, times a mask of its channels, and the logits."""
        beside = []
        for i in range(self.levels):
            x = getattr(self, f"encoder{i + 1}")(x)
            beside.append(x)
            x = functional.max_pool2d(x, 2, 2)
        x = self.bottleneck(x)
        for i in reversed(range(self.levels)):
            x = torch.cat([getattr(self, f"upconv{i + 1}")(x), beside[i]], 1)
            x = getattr(self, f"decoder{i + 1}")(x)
        x = x * mask
        return x, self.conv(x)


def block(inputs, out, name):
    layers = nn.Sequential()
    for i in (1, 2):
        layers.add_module(f"{name}conv{i}", nn.Conv2d(inputs, out, 3, padding=1, bias=False))
        layers.add_module(f"{name}norm{i}", nn.BatchNorm2d(out))
        layers.add_module(f"{name}relu{i}", nn.ReLU())
        inputs = out
    return layers
