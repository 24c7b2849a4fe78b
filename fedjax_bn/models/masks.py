"""Feature masks: arrays that multiply intermediates of any model, channel by channel.

They are a collection of their own, `mask`, beside a model's: name -> f[C]. The name "features" is
what the classifier reads (see `fedjax_bn.models.features`), or of a detector the maps that its
prediction layers read; any other is the path of a module, such as "layer4_1", whose output is
multiplied. The model needs no change: `models.forward.forward`,
through which all methods and adaptations pass, applies them wherever the variables hold any.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.models.features import features_method, shows_features, times
from fedjax_bn.normalization import normalize_with, running_statistics
from fedjax_bn.normalization.calls import Call, intercepting, name_of, shapes_of
from fedjax_bn.sharing import SharingRule, Variables, path_names

PyTree = Any
Masks = Mapping[str, jax.Array]

COLLECTION = "mask"
FEATURES = "features"


def take(variables: Variables) -> tuple[Variables, Masks]:
    """The variables without their masks, and the masks; {} where there are none."""
    plain = {name: tree for name, tree in variables.items() if name != COLLECTION}
    return plain, variables.get(COLLECTION, {})


def multiply(masks: Masks) -> AbstractContextManager:
    """A context in which the outputs of modules are masked; it acts while they are traced.

    Args:
      masks: name -> f[C]; that of the features is applied by `features_method`.
    """

    inside = {name: mask for name, mask in masks.items() if name != FEATURES}
    if not inside:
        return nullcontext()

    def masked(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        output = function(*args, **kwargs)
        name = "/".join(call.path)
        is_output = call.method == "__call__" and name in inside
        return times(output, inside[name]) if is_output else output

    return intercepting(masked)


def with_masks(
    model: Any,
    variables: Variables,
    names: Iterable[str] = (FEATURES,),
    images: jax.Array | None = None,
) -> Variables:
    """The variables with masks of ones; masks that are there already stay as they are.

    Args:
      model: a linen module, or what `from_nnx` makes.
      variables: its collections, arrays or `jax.ShapeDtypeStruct`.
      names: "features", or paths of modules; "features" of a model with `taps` (name -> channels),
        such as a detector, are all of these.
      images: f[B, ...] as the model reads them, of which only the shape counts. Without them
        sizes are read from parameters: that of a layer from its own kernel, scale or bias, that of
        the features from the dense layer in `classify`, or else from the only dense layer whose
        outputs no other one reads. A size that is wrong is an error where the mask is applied.

    Raises:
      ValueError: there is no intermediate of such a name, or its size cannot be found.
    """
    plain, old = take(variables)
    taps = getattr(model, "taps", {})
    named = [each for name in names for each in (taps if name == FEATURES and taps else (name,))]
    wanted = [name for name in named if name not in old]
    found = _sizes_by_parameters(model, plain) if images is None else channels(model, plain, images)
    for name in wanted:
        if found.get(name) is None:
            known = ", ".join(sorted(key for key, size in found.items() if size is not None))
            said = f"{name_of(model)} has no intermediate {name!r} to mask; valid are {known}"
            if images is None:
                said += (
                    ", whose sizes the parameters tell: for another give variables to which "
                    "fedjax_bn.models.masks.with_masks(model, variables, names, images=images) has "
                    "added the masks"
                )
            raise ValueError(said)
    dtype = jax.tree.leaves(plain["params"])[0].dtype
    return {**plain, COLLECTION: {name: jnp.ones(found[name], dtype) for name in wanted} | {**old}}


def channels(model: Any, variables: Variables, images: jax.Array) -> dict[str, int]:
    """Name -> channels of every intermediate that can be masked; nothing is computed.

    Args:
      model: a linen module, or what `from_nnx` makes.
      variables: its collections; only shapes count.
      images: f[B, ...]; only the shape counts.
    """
    found = {}

    def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        output = function(*args, **kwargs)
        if call.method == "__call__" and call.path and hasattr(output, "shape"):
            found["/".join(call.path)] = output.shape[-1]
        return output

    with intercepting(note), normalize_with(running_statistics):
        shapes_of(model, variables, images)
    try:
        method = features_method(model, variables, images)
    except ValueError:  # no dense layer at the end: other names remain
        return found
    features, _ = jax.eval_shape(
        lambda variables, images: model.apply(variables, images, method=method), variables, images
    )
    return found | {FEATURES: features.shape[-1]}


def _sizes_by_parameters(model: Any, variables: Variables) -> dict[str, int | None]:
    """Name -> outputs of every layer that owns a kernel, a scale or a bias, and the features.

    What a model calls its `taps` (name -> channels), such as a detector, counts too.
    """
    found: dict[str, int | None] = dict(getattr(model, "taps", {}))
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"]):
        *module, name = path_names(path)
        if name in ("kernel", "scale", "bias"):
            found["/".join(module)] = leaf.shape[-1]
    return found | {FEATURES: _features_by_kernels(model, variables)}


def _features_by_kernels(model: Any, variables: Variables) -> int | None:
    """The inputs of the dense layer in `classify`, or of the one that no other one reads."""
    if shows_features(model):
        return _inputs_of_classify(model, variables)
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    kernels = [k for path, k in leaves if path_names(path)[-1] == "kernel" and k.ndim == 2]
    last = [
        kernel
        for kernel in kernels
        if not any(other.shape[0] == kernel.shape[1] for other in kernels if other is not kernel)
    ]
    return last[0].shape[0] if len(last) == 1 else None


def _inputs_of_classify(model: Any, variables: Variables) -> int | None:
    """What the first dense layer reads that `classify` calls."""
    found: list[int] = []

    def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        if call.kernel is not None and call.method == "__call__" and not found:
            found.append(call.kernel.shape[0])
            args = (jnp.zeros((1, found[0]), call.kernel.dtype),)
        return function(*args, **kwargs)

    def classify(model: Any, features: jax.Array) -> Any:
        return model.classify(features)

    with intercepting(note), normalize_with(running_statistics):
        dtype = jax.tree.leaves(variables["params"])[0].dtype
        jax.eval_shape(
            lambda variables, x: model.apply(variables, x, method=classify),
            variables,
            jax.ShapeDtypeStruct((1, 1), dtype),
        )
    return found[0] if found else None


def keep_masks(share: SharingRule) -> SharingRule:
    """The sharing rule, by which every client keeps its masks."""

    def rule(variables: Variables) -> PyTree:
        plain, masks = take(variables)
        return {**share(plain), COLLECTION: dict.fromkeys(masks, False)}

    return rule
