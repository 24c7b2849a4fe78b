"""Converts PyTorch's weights of a network to our variables of the same network, and back.

ResNet and DenseNet have torchvision's names, DigitCNN and AlexNet the names in FedBN's code, and
MLP similar ones (fc1, bn1, fc2, bn2, fc3). UNet has the names of the PyTorch hub's
mateuszbuda/brain-segmentation-pytorch; ViT and ConvNeXt have timm's names. YOLOv5's names number
its layers from 0 to 24; its state dict also has a tensor with the anchors, in cells.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_bn.models.networks import MLP, AlexNet, DenseNet, DigitCNN, ResNet
from fedjax_bn.models.unet import UNet
from fedjax_bn.models.vit import ConvNeXt, ViT
from fedjax_bn.models.yolo import YOLOv5

Path = tuple[str, ...]

# Substitutions, in order, from our path of a layer, such as "layer1_0/conv1", to PyTorch's name.
_FEDBN = ((r"^norm", "bn"), (r"^dense", "fc"), (r"^head$", "fc3"))
_NAMES = {
    DigitCNN: _FEDBN,
    MLP: _FEDBN,
    AlexNet: (
        *_FEDBN,
        (r"^(conv\d|bn[1-5])$", r"features.\1"),
        (r"^(fc\d|bn[67])$", r"classifier.\1"),
    ),
    ResNet: (
        (r"^(layer\d+)_(\d+)/", r"\1.\2."),
        (r"shortcut_conv$", "downsample.0"),
        (r"shortcut_norm$", "downsample.1"),
        (r"norm(\d)$", r"bn\1"),
        (r"^head$", "fc"),
    ),
    DenseNet: (
        (r"^stem_(conv|norm)$", r"features.\g<1>0"),
        (r"^block(\d+)_layer(\d+)/", r"features.denseblock\1.denselayer\2."),
        (r"^(transition\d+)/", r"features.\1."),
        (r"^final_norm$", "features.norm5"),
        (r"^head$", "classifier"),
    ),
    UNet: (
        (r"^(enc|dec)(oder)(\d+)/", r"\1\2\3.\1\3"),
        (r"^bottleneck/", "bottleneck.bottleneck"),
        (r"^up(\d+)$", r"upconv\1"),
        (r"^head$", "conv"),
    ),
    ViT: (
        (r"^block(\d+)/", r"blocks.\1."),
        (r"(qkv|proj)$", r"attn.\1"),
        (r"(fc\d)$", r"mlp.\1"),
        (r"^patch_embed$", "patch_embed.proj"),
    ),
    ConvNeXt: (
        (r"^stem_conv$", "stem.0"),
        (r"^stem_norm$", "stem.1"),
        (r"^down(\d+)_norm$", r"stages.\1.downsample.0"),
        (r"^down(\d+)_conv$", r"stages.\1.downsample.1"),
        (r"^stage(\d+)_block(\d+)/", r"stages.\1.blocks.\2."),
        (r"(fc\d)$", r"mlp.\1"),
        (r"\.ls$", ""),
        (r"^norm$", "head.norm"),
        (r"^head$", "head.fc"),
    ),
    YOLOv5: (
        (r"^predict(\d)$", r"model.24.m.\1"),
        (r"^layer(\d+)/", r"model.\1."),
        (r"bottleneck(\d+)/", r"m.\1."),
        (r"norm$", "bn"),
        (r"/", "."),
    ),
}
_ANCHORS = "model.24.anchors"
# Leaves of another name in PyTorch.
_LEAVES = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
# Leaves of the same layout in both, whatever their number of axes.
_SAME = ("cls_token", "pos_embed")
_COUNTER = "num_batches_tracked"


def from_torch(
    model: nn.Module, state_dict: Mapping[str, Any], image_shape: Sequence[int] | None = None
) -> dict[str, Any]:
    """Returns variables with which `model` computes the same outputs as PyTorch's network.

    Kernels of convolutions are transposed from (out, in, height, width) to (height, width, in,
    out), of transposed ones from (in, out, height, width) too, and those of dense layers from (out,
    in) to (in, out). The inputs of a dense layer after a flattened map are permuted from (channel,
    height, width) to (height, width, channel). Dtypes are unchanged.

    Args:
      model: a network of this package.
      state_dict: arrays by PyTorch's names, every parameter and running statistic; the counters
        `num_batches_tracked` are ignored.
      image_shape: (height, width, channels) of one image; None for the network's usual one. Only
        the variables of DigitCNN and MLP depend on height and width.

    Raises:
      ValueError: PyTorch's names are unknown for this kind of model, or a tensor is missing, left
        over, of another shape or not finite, or a variance is negative; the message names it.
    """
    image_shape = image_shape or _usual_shape(model)
    # Shapes suffice, so that nothing is drawn only to be replaced.
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    leaves = flatten_dict(jax.eval_shape(model.init, jax.random.key(0), images))
    return unflatten_dict(convert(model, state_dict, leaves, image_shape))


def convert(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    leaves: Mapping[Path, Any],
    image_shape: Sequence[int] = (224, 224, 3),
) -> dict[Path, jax.Array]:
    """Converts PyTorch's tensors to some leaves of the variables of `model`, path -> array.

    All is as in `from_torch`; `leaves` is path -> an object with its shape.
    """
    names = {path: torch_name(model, path) for path in leaves}
    expected = {*names.values(), *([_ANCHORS] if isinstance(model, YOLOv5) else [])}
    # Counters of batches mean nothing here, whether a file has them or not.
    counters = {name.replace(_LEAVES["mean"], _COUNTER) for name in expected}
    unfit = expected ^ (set(state_dict) - (counters - expected))
    if unfit:
        lacking, extra = sorted(expected & unfit), sorted(unfit - expected)
        problem = f"lacks {len(lacking)} {lacking[:5]}, and has left over {len(extra)} {extra[:5]}"
        raise ValueError(f"the state dict of a {type(model).__name__} {problem}")
    if isinstance(model, YOLOv5):
        # Published files hold them in half precision.
        anchors, model_anchors = np.asarray(state_dict[_ANCHORS]), _anchors_in_cells(model)
        same_shape = anchors.shape == model_anchors.shape
        if not (same_shape and np.allclose(anchors, model_anchors, rtol=1e-3)):
            cells = f"{anchors.tolist()} in cells, and this model's {model_anchors.tolist()}"
            raise ValueError(f"{_ANCHORS} are {cells}: build it with the file's, in pixels")
    maps = _flattened_maps(model, image_shape)
    converted = {}
    for path, leaf in leaves.items():
        name, shape = names[path], leaf.shape
        same = len(shape) < 2 or path[-1] in _SAME
        torch_shape = shape if same else (*shape[:-3:-1], *shape[:-2])
        tensor = _fitting(name, _swapped(name, state_dict[name]), torch_shape)
        if path in maps:
            # PyTorch flattens a map channel by channel, and flax position by position.
            tensor = tensor.reshape(-1, *maps[path]).transpose(0, 2, 3, 1).reshape(tensor.shape)
        converted[path] = jnp.asarray(tensor if same else np.moveaxis(tensor, (1, 0), (-2, -1)))
    return converted


def to_torch(
    model: nn.Module, variables: Mapping[str, Any], image_shape: Sequence[int] | None = None
) -> dict[str, np.ndarray]:
    """Returns the state dict with which PyTorch's network computes the same outputs as `model`.

    It includes counters `num_batches_tracked` of 0 and, for a YOLOv5, the anchors. `model` and
    `image_shape` are as in `from_torch`; `variables` are "params" and "batch_stats" of the model.
    """
    maps = _flattened_maps(model, image_shape or _usual_shape(model))
    state_dict = {}
    for path, leaf in flatten_dict(variables).items():
        tensor, name = np.asarray(leaf), torch_name(model, path)
        if tensor.ndim > 1 and path[-1] not in _SAME:
            tensor = np.moveaxis(tensor, (-2, -1), (1, 0))
        if path in maps:
            channels, height, width = maps[path]
            tensor = tensor.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
            tensor = tensor.reshape(len(tensor), -1)
        state_dict[name] = _swapped(name, tensor)
        if name.endswith(_LEAVES["mean"]):
            state_dict[name.replace(_LEAVES["mean"], _COUNTER)] = np.zeros((), np.int64)
    if isinstance(model, YOLOv5):
        state_dict[_ANCHORS] = _anchors_in_cells(model)
    return state_dict


def torch_name(model: nn.Module, path: Path) -> str:
    """Returns PyTorch's name of a leaf; ValueError if none are known for this kind of model.

    A ResNet's ("params", "layer1_0", "conv1", "kernel") becomes "layer1.0.conv1.weight".
    """
    if type(model) not in _NAMES:
        kinds = ", ".join(sorted(kind.__name__ for kind in _NAMES))
        raise ValueError(f"PyTorch's names are known for {kinds}, not for {type(model).__name__}")
    _, *layer, leaf = path
    name = "/".join(layer)
    for pattern, replacement in _NAMES[type(model)]:
        name = re.sub(pattern, replacement, name)
    return f"{name}.{_LEAVES.get(leaf, leaf)}".removeprefix(".")


def _swapped(name: str, tensor: Any) -> Any:
    """Swaps the channels of a UNet's transposed convolution, which PyTorch stores as (in, out)."""
    return np.swapaxes(tensor, 0, 1) if "upconv" in name and np.ndim(tensor) > 1 else tensor


def _usual_shape(model: nn.Module) -> Sequence[int]:
    return {DigitCNN: (28, 28, 3), MLP: (5995,)}.get(type(model), (224, 224, 3))


def _flattened_maps(model: nn.Module, image_shape: Sequence[int]) -> dict[Path, tuple[int, ...]]:
    """Path of the dense kernel after a flattened map -> (channels, height, width) of the map."""
    path = ("params", "dense1", "kernel")
    if isinstance(model, AlexNet):
        return {path: (256, 6, 6)}
    if isinstance(model, DigitCNN):
        return {path: (2 * model.width, image_shape[0] // 4, image_shape[1] // 4)}
    return {}


def _anchors_in_cells(model: YOLOv5) -> np.ndarray:
    """The anchors f32[levels, A, 2] in cells, as PyTorch's YOLOv5 stores them."""
    sizes, strides = model.anchors
    return np.asarray(sizes, np.float32) / np.asarray(strides, np.float32)[:, None, None]


def _fitting(name: str, tensor: Any, shape: tuple[int, ...]) -> np.ndarray:
    """PyTorch's tensor as an array; raises ValueError if shape or values do not fit."""
    tensor = np.asarray(tensor)
    dtype = jax.dtypes.canonicalize_dtype(tensor.dtype)  # float32 unless JAX has float64
    fits = tensor.shape == shape and jnp.issubdtype(dtype, jnp.floating)
    fits = fits and (np.abs(tensor) <= float(jnp.finfo(dtype).max)).all()
    if not fits or (name.endswith(_LEAVES["var"]) and (tensor < 0).any()):
        remedy = ": set the file's image_size" * name.endswith("pos_embed")
        raise ValueError(
            f"{name} has shape {tensor.shape} of {tensor.dtype}, but this model needs {shape} of "
            f"numbers that are finite in {dtype}, and variances of at least 0{remedy}"
        )
    return tensor
