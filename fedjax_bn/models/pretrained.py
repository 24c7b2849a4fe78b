"""Weights that others trained on ImageNet, as the start of a federation.

They come as PyTorch's tensors by torchvision's names: from a `.safetensors` file, from a hub that
keeps such files (timm's conversions of torchvision's weights), or from torchvision's own `.pth`.
A YOLOv5 starts from a file of the user's own, and no code that a file holds is ever run.
Every tensor is used once; one that is missing, left over or of another shape is an error.
"""

import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_bn.models.cnn import AlexNet
from fedjax_bn.models.densenet import DenseNet
from fedjax_bn.models.resnet import ResNet
from fedjax_bn.models.torch_weights import convert, torch_name
from fedjax_bn.models.yolo import YOLOv5

_Tensors = dict[str, np.ndarray]

# Other names of the same tensors: torchvision counts AlexNet's layers, and its DenseNet files
# still have the names of 2017.
_RENAMED = {
    AlexNet: tuple(
        (rf"^features\.{index}\.", f"features.conv{i}.")
        for i, index in enumerate((0, 3, 6, 8, 10), start=1)
    )
    + tuple(
        (rf"^classifier\.{index}\.", f"classifier.fc{i}.")
        for i, index in enumerate((1, 4, 6), start=1)
    ),
    DenseNet: ((r"(\.denselayer\d+\.(?:norm|conv))\.(\d\.)", r"\1\2"),),
    ResNet: (),
    YOLOv5: (),
}


def load(
    source: str | Path, model: nn.Module, variables: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The variables of `model` with pretrained weights in them.

    The classifier stays as it is where the file's has another number of classes. AlexNet takes
    torchvision's convolutions and dense layers; batch norms, which that network lacks, stay
    (UniFed, section 4.1.1), and so do dense layers of another width. A file with the names of
    FedBN's AlexNet fills it whole.

    Args:
      source: a `.safetensors`, `.pth` or `.pt` file, or the id of a repository on the Hugging Face
        hub with a `model.safetensors`, such as "timm/resnet18.tv_in1k", optionally "id@revision".
      model: a ResNet, DenseNet, AlexNet or YOLOv5 of this package.
      variables: its collections. Only shapes and dtypes are read, so they may be abstract.

    Returns:
      The variables, dtypes as before, and sentences on what was loaded and what starts fresh.

    Raises:
      FileNotFoundError: there is no such file, and `source` is no hub id either.
      ModuleNotFoundError: a package that reads this form is not installed.
      ValueError: the model is another, the file is damaged or cannot be fetched, or a tensor is
        missing, left over, of another shape or not finite, or a variance is negative; the message
        names it.
    """
    if type(model) not in _RENAMED:
        raise ValueError(
            f"there are no pretrained weights for {type(model).__name__}: choose ResNet18, "
            "ResNet50, DenseNet121, AlexNet or YOLOv5, or leave pretrained empty"
        )
    leaves = flatten_dict(variables)
    found = read(source)
    try:
        tensors, fresh, notes = _choose(model, leaves, _rename(model, found))
        names = {path: torch_name(model, path) for path in leaves}
        wanted = {path: leaf for path, leaf in leaves.items() if names[path] not in fresh}
        loaded = convert(model, tensors, wanted)
    except ValueError as error:
        raise ValueError(f"pretrained weights {source} do not fit: {error}") from error
    new = {path: value.astype(leaves[path].dtype) for path, value in loaded.items()}
    notes = (f"pretrained: {len(new)} of {len(leaves)} arrays come from {source}", *notes)
    return unflatten_dict(leaves | new), notes


def _choose(
    model: nn.Module, leaves: Mapping[tuple[str, ...], Any], tensors: _Tensors
) -> tuple[_Tensors, set[str], tuple[str, ...]]:
    """The tensors to use, the names of those that the model keeps of its own, and notes."""
    names = {path: torch_name(model, path) for path in leaves}
    if isinstance(model, AlexNet) and "features.bn1.weight" not in tensors:
        return _choose_without_batch_norm(leaves, names, tensors)
    paths = _head(model)
    head, *_ = head_names = [names[path] for path in paths]
    ours = leaves[paths[0]].shape[-1]
    shape = tensors[head].shape if head in tensors else ()
    if not shape or shape[0] == ours:  # `convert` names one that is missing or of another shape
        return tensors, set(), ()
    used = {name: tensor for name, tensor in tensors.items() if name not in head_names}
    note = (
        f"pretrained: the classifier starts fresh, because the file's has "
        f"{_classes(model, shape[0])} classes and this model {_classes(model, ours)}"
    )
    return used, set(head_names), (note,)


def _head(model: nn.Module) -> list[tuple[str, ...]]:
    """The paths of what depends on the number of classes, a kernel first."""
    layers = ["head"]
    if isinstance(model, YOLOv5):
        layers = [f"predict{i}" for i in range(len(model.anchors.strides))]
    return [("params", layer, leaf) for layer in layers for leaf in ("kernel", "bias")]


def _classes(model: nn.Module, outputs: int) -> int:
    """How many classes so many outputs of the head's first layer are."""
    return outputs // model.anchors.each - 5 if isinstance(model, YOLOv5) else outputs


def _choose_without_batch_norm(
    leaves: Mapping[tuple[str, ...], Any], names: Mapping[tuple[str, ...], str], tensors: _Tensors
) -> tuple[_Tensors, set[str], tuple[str, ...]]:
    """`_choose` for torchvision's AlexNet: dense layers where the widths fit, no batch norms."""
    fresh = {name for name in names.values() if ".bn" in name}
    notes = ["pretrained: batch norms start fresh, because torchvision's AlexNet has none"]
    for path, name in names.items():
        if path[-1] != "kernel" or name not in tensors:  # `convert` names one that is missing
            continue
        theirs, ours = tensors[name].shape, leaves[path].shape[::-1]
        if len(theirs) == 2 and theirs != ours:
            layer = name.removesuffix(".weight")
            fresh |= {name, f"{layer}.bias"}
            notes.append(
                f"pretrained: {layer} starts fresh, because the file's is {theirs[1]} to "
                f"{theirs[0]} and this model's {ours[1]} to {ours[0]}"
            )
    return {name: t for name, t in tensors.items() if name not in fresh}, fresh, tuple(notes)


def _rename(model: nn.Module, tensors: _Tensors) -> _Tensors:
    """The names that `torch_name` gives."""

    def usual(name: str) -> str:
        for pattern, replacement in _RENAMED[type(model)]:
            name = re.sub(pattern, replacement, name)
        return name

    renamed = {usual(name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        usuals = sorted(map(usual, tensors))
        twice = next(one for one, other in pairwise(usuals) if one == other)
        raise ValueError(f"two tensors are called {twice}, one of them by another name of it")
    return renamed


def read(source: str | Path) -> _Tensors:
    """The tensors of a file or hub id, by their names; see `load` for arguments and errors."""
    path, suffix = Path(source), Path(source).suffix
    if suffix in _READERS and path.is_file():
        with _damage_named(path):
            return _READERS[suffix](path)
    choices = "give a .safetensors or .pth file, or a hub id such as timm/resnet18.tv_in1k"
    if path.exists():
        raise ValueError(
            f"pretrained weights {source} are no {', '.join(_READERS)} file: {choices}"
        )
    if suffix in _READERS or not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?", str(source)):
        raise FileNotFoundError(f"there is no file {source} with pretrained weights: {choices}")
    return read(_download(str(source)))


class _HoldsCode(ValueError):
    """A file holds more than tensors."""


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (ImportError, _HoldsCode):
        raise
    except Exception as error:  # the readers promise no types for what damage can cause
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"pretrained weights {path} are damaged or of another form ({type(error).__name__}: "
            f"{reason}): fetch the file again"
        ) from error


def _read_safetensors(path: Path) -> _Tensors:
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise _missing("safetensors", f"reading {path}") from error
    return load_file(path)


def _read_torch(path: Path) -> _Tensors:
    try:
        import torch
    except ImportError as error:
        raise ModuleNotFoundError(
            f"reading {path} needs torch: pip install torch, or give a .safetensors file"
        ) from error
    try:
        state_dict = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "nsupported global" not in str(error):  # of a file that is damaged
            raise
        raise _HoldsCode(
            f"pretrained weights {path} are damaged or hold objects of another package, which are "
            "not read because that would run code: where that package is installed, save "
            "model.float().state_dict() by torch.save or as .safetensors, and give that file"
        ) from error
    return {str(name): tensor.detach().numpy() for name, tensor in state_dict.items()}


_READERS: dict[str, Callable[[Path], _Tensors]] = {
    ".safetensors": _read_safetensors,
    ".pth": _read_torch,
    ".pt": _read_torch,
}


def _download(source: str) -> str:
    """The path of a repository's weights, fetched or from the hub's cache on this machine."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise _missing("huggingface_hub", f"fetching {source}") from error
    name, _, revision = source.partition("@")
    try:
        return hf_hub_download(name, "model.safetensors", revision=revision or None)
    except Exception as error:  # no network, no such repository, no such file, no space, ...
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"pretrained weights {source!r} are no file here and cannot be fetched from the hub "
            f"({type(error).__name__}: {reason}): check the id and the connection, or give a file"
        ) from error


def _missing(package: str, purpose: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"{purpose} needs {package}: pip install 'fedjax_bn[pretrained]'")
