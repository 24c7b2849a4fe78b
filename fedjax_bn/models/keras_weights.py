"""Reads a ResNet of Keras' applications from the form of TensorFlow.js, by torchvision's names.

A folder has `model.json`, whose manifest lists arrays and their shards, and the shards. It is the
form of He et al. 2016 that `ResNet(keras=True)` computes: the stride in the first 1x1 convolution
of a bottleneck, and an epsilon of 1e-3.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# Keras subtracts these means from pixels 0 to 255 in the order blue, green, red.
_BGR_MEANS = np.array((103.939, 116.779, 123.68))
# The usual standardization of RGB pixels 0 to 1, of which ours are made.
_MEAN, _STD = np.array((0.485, 0.456, 0.406)), np.array((0.229, 0.224, 0.225))
_LEAVES = {
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "bias": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
_BRANCHES = {"2a": "conv1", "2b": "conv2", "2c": "conv3", "1": "downsample.0"}


def read_keras(folder: Path) -> dict[str, np.ndarray]:
    """Returns the tensors by torchvision's names, for a network without biases in convolutions.

    A convolution's bias is subtracted from the running mean of the batch norm that follows. The
    first kernel reads RGB images standardized by ImageNet's mean and standard deviation: its
    channels are reversed and scaled, and what the means differ by, at most half a grey level, is
    subtracted from the running mean. Only at the border, where Keras pads with its own mean, do the
    results differ by that much.

    Args:
      folder: has `model.json` and the shards that it names.

    Raises:
      FileNotFoundError: a shard is missing.
      ValueError: the manifest or a shard is damaged, or an array has another name than those of a
        ResNet of Keras.
    """
    tensors, biases = {}, {}
    for name, array in _arrays(folder):
        layer, leaf = _torch_layer(name), name.rpartition("/")[2]
        if leaf == "bias" and layer != "fc":
            biases[_norm_after(layer)] = array
            continue
        # Keras' kernels end in (inputs, outputs), PyTorch's begin with (outputs, inputs).
        kernel = array if array.ndim < 2 else np.moveaxis(array, (-2, -1), (1, 0))
        tensors[f"{layer}.{_LEAVES[leaf]}"] = kernel
    for layer, bias in biases.items():
        mean = tensors[f"{layer}.running_mean"]
        # norm(x + bias) with mean m is norm(x) with mean m - bias.
        tensors[f"{layer}.running_mean"] = mean.astype(np.float64) - bias
    _read_rgb(tensors)
    return tensors


def _read_rgb(tensors: dict[str, np.ndarray]) -> None:
    """Makes the first kernel f[F, 3, h, w] read standardized RGB instead of BGR less its means."""
    kernel = tensors["conv1.weight"].astype(np.float64)[:, ::-1]
    # In grey levels: what ImageNet's means differ by from those that Keras subtracts.
    offset = 255 * _MEAN - _BGR_MEANS[::-1]
    mean = tensors["bn1.running_mean"] - kernel.sum((2, 3)) @ offset
    kernel = kernel * (255 * _STD)[:, None, None]
    tensors |= {"conv1.weight": kernel, "bn1.running_mean": mean}


def _torch_layer(name: str) -> str:
    """Torchvision's name of an array's layer: "layer1.0.bn1" for "bn2a_branch2a/gamma"."""
    layer, _, leaf = name.rpartition("/")
    usual = {"conv1": "conv1", "bn_conv1": "bn1", "fc1000": "fc"}.get(layer)
    match = re.fullmatch(r"(res|bn)(\d)([a-z])_branch(2[abc]|1)", layer)
    if usual and leaf in _LEAVES:
        return usual
    if not match or leaf not in _LEAVES:
        raise ValueError(f"{name} is not of a ResNet of Keras: give the folder of a ResNet50")
    kind, stage, block, branch = match.groups()
    part = _BRANCHES[branch] if kind == "res" else _norm_after(_BRANCHES[branch])
    return f"layer{int(stage) - 1}.{ord(block) - ord('a')}.{part}"


def _norm_after(layer: str) -> str:
    """Torchvision's name of the batch norm that follows a convolution."""
    return layer.replace("conv", "bn").replace("downsample.0", "downsample.1")


def _arrays(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and array of the manifest; each group's shards are joined."""
    place = folder / "model.json"
    try:
        for group in json.loads(place.read_text())["weightsManifest"]:
            paths = [folder / Path(path).name for path in group["paths"]]
            content, start = b"".join(path.read_bytes() for path in paths), 0
            for entry in group["weights"]:
                if entry["dtype"] != "float32" or "quantization" in entry:
                    raise ValueError(f"{entry['name']} is not of plain, unquantized float32")
                array = np.frombuffer(content, "<f4", int(np.prod(entry["shape"])), start)
                yield entry["name"], array.reshape(entry["shape"])
                start += array.nbytes
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{place} or a shard of it is damaged or of another form ({error!r}): fetch it again"
        ) from error
