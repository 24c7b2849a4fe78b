"""Loads weights that others trained on ImageNet, as the start of a federation.

They are PyTorch's tensors by torchvision's or timm's names, read from a `.safetensors` file, from
the Hugging Face hub (timm's conversions of torchvision's weights), or from torchvision's own
`.pth`. A YOLOv5 or a UNet starts from the user's own file. Code in a file is never run.
"""

import importlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
# The tensor that `launch/convert/keras_resnet.py` adds.
KERAS_MARK = "form_of_keras"


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
        In a path ~ is the home folder.
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
    if type(model) not in _KINDS:
        kinds = ", ".join(kind.__name__ for kind in _KINDS)
        raise ValueError(f"pretrained weights are for {kinds}, not for {type(model).__name__}")
    leaves = flatten_dict(variables)
    names = {path: torch_name(model, path) for path in leaves}
    tensors = {}
    for name, tensor in _read(source).items():
        for pattern, replacement in _RENAMED.get(type(model), ()):
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    # Equal names and shapes, but another stride and epsilon: nothing else would notice.
    if (tensors.pop(KERAS_MARK, None) is not None) != getattr(model, "keras", False):
        raise ValueError(
            f"pretrained weights {source} do not fit this {type(model).__name__}: files of "
            "launch/convert/keras_resnet.py are for keras=True, all others for keras=False"
        )
    if getattr(model, "after", ""):
        # Nor does the model read what is before this block in the file of the whole network.
        tensors = {name: tensor for name, tensor in tensors.items() if name in {*names.values()}}
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


def _read(source: str | Path) -> _Tensors:
    """Reads the tensors of a file or hub id, by name."""
    path = Path(os.path.expanduser(source))
    if path.suffix in _SUFFIXES and path.is_file():
        return _read_file(path)
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?", str(source))
    if path.exists() or path.suffix in _SUFFIXES or not is_id:
        raise FileNotFoundError(
            f"{source} is no file with pretrained weights: give a .safetensors or .pth file, or a "
            "hub id as timm/resnet18.tv_in1k; for Keras' folder run launch/convert/keras_resnet.py"
        )
    # Imported only here: most runs start from scratch or from a file.
    hub = _imported("huggingface_hub", f"fetching {source}")
    name, _, revision = str(source).partition("@")
    with _faults_named(source, "cannot be fetched", "check the id, or give a file"):
        file = hub.hf_hub_download(name, "model.safetensors", revision=revision or None)
    return _read_file(Path(file))


def _read_file(path: Path) -> _Tensors:
    safe = path.suffix == ".safetensors"
    module = _imported("safetensors.numpy" if safe else "torch", f"reading {path}")
    remedy = "fetch them again, or save model.float().state_dict()"
    with _faults_named(path, "are damaged or hold objects", remedy):
        if safe:
            return module.load_file(path)
        # weights_only: an unpickler that makes tensors and nothing else.
        tensors = module.load(path, map_location="cpu", weights_only=True)
        return {str(name): tensor.detach().numpy() for name, tensor in tensors.items()}


@contextmanager
def _faults_named(source: str | Path, problem: str, remedy: str) -> Iterator[None]:
    # A hub may be out of reach, and readers raise any type of exception for a damaged file.
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"pretrained weights {source} {problem} ({reason}): {remedy}") from error


def _imported(name: str, purpose: str) -> Any:
    """Imports a module; its ModuleNotFoundError says how to install the package."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        remedy = "torch" if package == "torch" else "'fedjax_bn[pretrained]'"
        raise ModuleNotFoundError(f"{purpose} needs {package}: pip install {remedy}") from error
