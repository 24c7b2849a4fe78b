"""torchvision's tensors of small networks, their names written out by hand."""

import numpy as np

NORM = ("weight", "bias", "running_mean", "running_var")


def resnet_tensors(classes=7, width=8, seed=1):
    """A ResNet of basic blocks (1, 2) by torchvision's names, written out by hand."""
    rng = np.random.default_rng(seed)
    tensors = {}

    def put(name, *shape):
        tensors[name] = rng.random(shape).astype(np.float32) + 0.1

    def norm(name, channels):
        for leaf in NORM:
            put(f"{name}.{leaf}", channels)
        tensors[f"{name}.num_batches_tracked"] = np.array(9, np.int64)

    put("conv1.weight", width, 3, 7, 7)
    norm("bn1", width)
    blocks = (
        ("layer1.0", width, width),
        ("layer2.0", width, 2 * width),
        ("layer2.1", 2 * width, 2 * width),
    )
    for block, inputs, outputs in blocks:
        put(f"{block}.conv1.weight", outputs, inputs, 3, 3)
        norm(f"{block}.bn1", outputs)
        put(f"{block}.conv2.weight", outputs, outputs, 3, 3)
        norm(f"{block}.bn2", outputs)
        if inputs != outputs:
            put(f"{block}.downsample.0.weight", outputs, inputs, 1, 1)
            norm(f"{block}.downsample.1", outputs)
    put("fc.weight", classes, 2 * width)
    put("fc.bias", classes)
    return tensors


def alexnet_tensors(seed=0, widths=(8, 8), classes=8):
    """torchvision's AlexNet, whose dense layers are made small here."""
    rng = np.random.default_rng(seed)
    tensors = {}
    channels = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3)}
    for index, (out, inputs, side) in (channels | {10: (256, 256, 3)}).items():
        tensors[f"features.{index}.weight"] = rng.random((out, inputs, side, side), np.float32)
        tensors[f"features.{index}.bias"] = rng.random(out, np.float32)
    inputs = (9216, *widths)
    for index, into, out in zip((1, 4, 6), inputs, (*widths, classes), strict=True):
        tensors[f"classifier.{index}.weight"] = rng.random((out, into), np.float32)
        tensors[f"classifier.{index}.bias"] = rng.random(out, np.float32)
    return tensors
