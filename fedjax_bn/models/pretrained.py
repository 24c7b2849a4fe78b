"""Loads weights that others trained on ImageNet, as the start of a federation.

They are PyTorch's tensors by torchvision's or timm's names, read from a `.safetensors` file, from
the Hugging Face hub (timm's conversions of torchvision's weights), or from torchvision's own
`.pth`. A YOLOv5 or a UNet starts from the user's own file. Code in a file is never run.
"""

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_bn.arguments.text import one_line
from fedjax_bn.models.networks import AlexNet, DenseNet, ResNet
from fedjax_bn.models.torch_weights import convert, torch_name
from fedjax_bn.models.unet import UNet
from fedjax_bn.models.vit import ConvNeXt, ViT
from fedjax_bn.models.yolo import YOLOv5

_Tensors = dict[str, np.ndarray]
_KINDS = (AlexNet, ConvNeXt, DenseNet, ResNet, UNet, ViT, YOLOv5)
_ALEXNET = {"features": ("conv", (0, 3, 6, 8, 10)), "classifier": ("fc", (1, 4, 6))}
# Other names of the same tensors -> the names of `torch_name`: torchvision numbers AlexNet's
# layers, and its DenseNet files still have the names of 2017.
_RENAMED: dict[type[nn.Module], list[tuple[str, str]]] = {
    AlexNet: [
        (rf"^{part}\.{number}\.", f"{part}.{layer}{i}.")
        for part, (layer, numbers) in _ALEXNET.items()
        for i, number in enumerate(numbers, start=1)
    ],
    DenseNet: [(r"(\.denselayer\d+\.(?:norm|conv))\.(\d\.)", r"\1\2")],
}
_SUFFIXES = (".safetensors", ".pth", ".pt")
# Keras subtracts these means from pixels 0 to 255 in the order blue, green, red.
_BGR_MEANS = np.array((103.939, 116.779, 123.68))
# The usual standardization of RGB pixels 0 to 1, of which ours are made.
_MEAN, _STD = np.array((0.485, 0.456, 0.406)), np.array((0.229, 0.224, 0.225))
_KERAS_LEAVES = {
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "bias": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
_BRANCHES = {"2a": "conv1", "2b": "conv2", "2c": "conv3", "1": "downsample.0"}


def load_pretrained(
    source: str | Path, model: nn.Module, variables: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the variables of `model` with pretrained weights.

    The classifier is unchanged if the file's has another number of classes, or if the file of a ViT
    or ConvNeXt has none, as DINOv2's. AlexNet takes torchvision's convolutions and dense layers;
    its batch norms, which torchvision's network lacks, are unchanged (UniFed, section 4.1.1), and
    so are dense layers of another width. A file of FedBN's AlexNet provides every tensor.

    Args:
      source: a `.safetensors`, `.pth` or `.pt` file, or the id of a repository on the Hugging Face
        hub with a `model.safetensors`, such as "timm/resnet18.tv_in1k", optionally "id@revision".
        For a ResNet with `keras=True`, a folder with `model.json` of TensorFlow.js. In a path
        ~ is the home folder.
      model: a ResNet, DenseNet, AlexNet, ViT, ConvNeXt, UNet or YOLOv5 of this package.
      variables: its collections. Only shapes and dtypes are read, so they may be abstract.

    Returns:
      The variables, with unchanged dtypes, and lines of text that list what was loaded and what
      starts fresh.

    Raises:
      FileNotFoundError: `source` is neither a file nor a hub id.
      ModuleNotFoundError: a package that reads this format is not installed.
      ValueError: there are no weights for this kind of model, the file is damaged or cannot be
        fetched, or a tensor does not fit (see `torch_weights.convert`); the message names it.
    """
    path, keras = Path(os.path.expanduser(source)), getattr(model, "keras", False)
    if type(model) not in _KINDS or (path / "model.json").is_file() != keras:
        raise ValueError(
            f"pretrained weights {source} are not for {type(model).__name__} with keras={keras}: "
            f"files are for {', '.join(kind.__name__ for kind in _KINDS)}, and folders of Keras "
            "for ResNet50:keras=True"
        )
    leaves = flatten_dict(variables)
    names = {path: torch_name(model, path) for path in leaves}
    tensors = {}
    for name, tensor in (_read_keras(path) if keras else _read(source, path)).items():
        for pattern, replacement in _RENAMED.get(type(model), ()):
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    if isinstance(model, ViT):
        # It replaces hidden patches in DINOv2's own training alone.
        tensors.pop("mask_token", None)
    try:
        if isinstance(model, AlexNet) and "features.bn1.weight" not in tensors:
            fresh, notes = _fresh_of_torchvisions_alexnet(leaves, names, tensors)
        else:
            fresh, notes = _fresh_classifier(model, leaves, names, tensors)
        used = {name: tensor for name, tensor in tensors.items() if name not in fresh}
        # What starts fresh keeps the values that it was drawn with.
        loaded_leaves = {path: leaf for path, leaf in leaves.items() if names[path] not in fresh}
        loaded = convert(model, used, loaded_leaves)
    except ValueError as error:
        raise ValueError(f"pretrained weights {source} do not fit: {error}") from error
    cast = {path: value.astype(leaves[path].dtype) for path, value in loaded.items()}
    summary = f"{len(cast)} of {len(leaves)} arrays come from {source}"
    return unflatten_dict(leaves | cast), tuple(f"pretrained: {n}" for n in (summary, *notes))


def _fresh_classifier(
    model: nn.Module, leaves: Mapping, names: Mapping, tensors: _Tensors
) -> tuple[set[str], list[str]]:
    """The classifier's tensor names if its number of classes differs from the file's; and notes."""
    layers, boxes, place = ["head"], 1, 0
    if isinstance(model, YOLOv5):
        layers = [f"predict{i}" for i in range(len(model.anchors.strides))]
        boxes, place = model.anchors.per_cell, 5  # a box has five numbers before its classes
    head = {names["params", layer, leaf] for layer in layers for leaf in ("kernel", "bias")}
    kernel = "params", layers[0], "kernel"
    outputs, file_shape = leaves[kernel].shape[-1], np.shape(tensors.get(names[kernel], 0.0))
    if isinstance(model, ViT | ConvNeXt) and not head & tensors.keys():
        return head, ["the classifier starts fresh, because the file has none"]
    if not file_shape or file_shape[0] == outputs:  # `convert` reports a missing or unfit tensor
        return set(), []
    classes, file_classes = (count // boxes - place for count in (outputs, file_shape[0]))
    note = f"the file's has {file_classes} classes and this model {classes}"
    return head, [f"the classifier starts fresh, because {note}"]


def _fresh_of_torchvisions_alexnet(
    leaves: Mapping, names: Mapping, tensors: _Tensors
) -> tuple[set[str], list[str]]:
    """The tensor names of batch norms and of dense layers of another width; and notes."""
    fresh = {name for name in names.values() if ".bn" in name}
    notes = ["batch norms start fresh, because torchvision's AlexNet has none"]
    for path, name in names.items():
        file_shape, model_shape = np.shape(tensors.get(name, 0.0)), leaves[path].shape[::-1]
        if path[-1] == "kernel" and len(file_shape) == 2 and file_shape != model_shape:
            layer = name.removesuffix(".weight")
            fresh |= {name, f"{layer}.bias"}
            notes.append(
                f"{layer} starts fresh, because the file's is {file_shape[1]} to {file_shape[0]} "
                f"and this model's {model_shape[1]} to {model_shape[0]}"
            )
    return fresh, notes


def _read(source: str | Path, path: Path) -> _Tensors:
    """Reads the tensors of a file or hub id, by name."""
    if path.suffix in _SUFFIXES and path.is_file():
        return _read_file(path)
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?", str(source))
    if path.exists() or path.suffix in _SUFFIXES or not is_id:
        raise FileNotFoundError(
            f"there is no file {source} with pretrained weights: give a .safetensors or .pth file, "
            "or a hub id such as timm/resnet18.tv_in1k"
        )
    # Imported only here: most runs start from scratch or from a file.
    hub = _imported("huggingface_hub", f"fetching {source}")
    name, _, revision = str(source).partition("@")
    try:
        file = hub.hf_hub_download(name, "model.safetensors", revision=revision or None)
    except Exception as error:  # no network, no such repository, no such file, no space, ...
        raise ValueError(
            f"pretrained weights {source} cannot be fetched ({_reason(error)}): check the id and "
            "the connection, or give a file"
        ) from error
    return _read_file(Path(file))


def _read_file(path: Path) -> _Tensors:
    safe = path.suffix == ".safetensors"
    module = _imported("safetensors.numpy" if safe else "torch", f"reading {path}")
    try:
        if safe:
            return module.load_file(path)
        # weights_only: an unpickler that makes tensors and nothing else.
        tensors = module.load(path, map_location="cpu", weights_only=True)
        return {str(name): tensor.detach().numpy() for name, tensor in tensors.items()}
    except Exception as error:  # a damaged file may raise any type of exception in the readers
        raise ValueError(
            f"pretrained weights {path} are damaged or hold objects, which would run code "
            f"({_reason(error)}): fetch the file again, or save model.float().state_dict()"
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _imported(name: str, purpose: str) -> Any:
    """Imports a module; its ModuleNotFoundError says how to install the package."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        remedy = "torch" if package == "torch" else "'fedjax_bn[pretrained]'"
        raise ModuleNotFoundError(f"{purpose} needs {package}: pip install {remedy}") from error


def _read_keras(folder: Path) -> _Tensors:
    """Reads a ResNet of Keras' applications from the form of TensorFlow.js, by torchvision's names.

    The folder has `model.json`, whose manifest lists arrays and their shards, and the shards. The
    network is `ResNet(keras=True)`, without biases in convolutions: a bias is subtracted from the
    running mean of the batch norm that follows. The first kernel reads RGB images standardized by
    ImageNet's mean and deviation: its channels are reversed and scaled, and what the means differ
    by, at most half a grey level, is subtracted from the running mean, so only borders differ.
    """
    tensors, biases = {}, {}
    for name, array in _arrays(folder):
        layer, leaf = _torch_layer(name), name.rpartition("/")[2]
        if leaf == "bias" and layer != "fc":
            biases[_norm_after(layer)] = array
            continue
        # Keras' kernels end in (inputs, outputs), PyTorch's begin with (outputs, inputs).
        kernel = array if array.ndim < 2 else np.moveaxis(array, (-2, -1), (1, 0))
        tensors[f"{layer}.{_KERAS_LEAVES[leaf]}"] = kernel
    for layer, bias in biases.items():
        mean = tensors[f"{layer}.running_mean"]
        # norm(x + bias) with mean m is norm(x) with mean m - bias.
        tensors[f"{layer}.running_mean"] = mean.astype(np.float64) - bias
    _read_rgb(tensors)
    return tensors


def _read_rgb(tensors: _Tensors) -> None:
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
    if usual and leaf in _KERAS_LEAVES:
        return usual
    if not match or leaf not in _KERAS_LEAVES:
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
                array = np.frombuffer(content, "<f4", int(np.prod(entry["shape"])), start)
                yield entry["name"], array.reshape(entry["shape"])
                start += array.nbytes
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{place} or a shard of it is damaged or of another form ({error!r}): fetch it again"
        ) from error
