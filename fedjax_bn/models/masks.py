"""Feature masks: arrays that multiply intermediates of any model, channel by channel.

They are a collection of their own, `mask`, beside a model's: name -> f[C]. The name "features" is
what the classifier sees (see `fedjax_bn.models.halves`), any other is the path of a module, such as
"layer4_1", whose output is multiplied. The model needs no change: who passes images with
`masks.apply` in place of `model.apply`, as `local.forward` and all adaptations do, has them applied
wherever the variables hold any.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.models.halves import FeaturesOf, calls_dense, last_dense, shows_halves
from fedjax_bn.normalization import BatchNorm
from fedjax_bn.sharing import STATISTICS, SharingRule, Variables

PyTree = Any
Masks = Mapping[str, jax.Array]

COLLECTION = "mask"
FEATURES = "features"
GUESSES = ((2, 224, 224, 3), (2, 16), (2, 16, 16))  # forms of images that a model may expect


def apply(
    model: nn.Module | FeaturesOf, variables: Variables, images: jax.Array, **options: Any
) -> Any:
    """`model.apply`, with the masks among the variables, if there are any.

    Args:
      model: linen module; of `FeaturesOf` the features are those before their own mask.
      variables: its collections, perhaps with `mask`.
      images: f[B, ...] as the model reads them.
      **options: of `model.apply`.
    """
    plain, masks = take(variables)
    if isinstance(model, FeaturesOf):
        masks = {name: mask for name, mask in masks.items() if name != FEATURES}
        with multiply(masks, model.model, plain, images):
            return model.apply(plain, images, **options)
    with multiply(masks, model, plain, images):
        return model.apply(plain, images, **options)


def take(variables: Variables) -> tuple[Variables, Masks]:
    """The variables without their masks, and the masks; {} where there are none."""
    plain = {name: tree for name, tree in variables.items() if name != COLLECTION}
    return plain, variables.get(COLLECTION, {})


def multiply(
    masks: Masks, model: nn.Module, variables: Variables, images: jax.Array
) -> AbstractContextManager:
    """A context in which passes of the model are masked; it acts while they are traced.

    Args:
      masks: name -> f[C].
      model: linen module.
      variables: its collections; only shapes count.
      images: f[B, ...]; only the shape counts.

    Raises:
      ValueError: the features are masked and the model does not end in an `nn.Dense`.
    """
    shown = shows_halves(model)
    classifier = None if shown or FEATURES not in masks else last_dense(model, variables, images)

    def masked(
        call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext
    ) -> Any:
        path, method = context.module.path, context.method_name
        if path == classifier and calls_dense(context):
            args = (times(args[0], masks[FEATURES]), *args[1:])
        output = call(*args, **kwargs)
        if shown and FEATURES in masks and (path, method) == ((), "features"):
            return times(output, masks[FEATURES])
        name = "/".join(path)
        is_output = method == "__call__" and name != FEATURES and name in masks
        return times(output, masks[name]) if is_output else output

    return nn.intercept_methods(masked)


def times(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x f[..., C] times a mask f[C], in the dtype of x."""
    return x * mask.astype(x.dtype)


def with_masks(
    model: nn.Module,
    variables: Variables,
    names: Iterable[str] = (FEATURES,),
    images: jax.Array | None = None,
) -> Variables:
    """The variables with masks of ones; masks that are there already stay as they are.

    Args:
      model: linen module.
      variables: its collections, arrays or `jax.ShapeDtypeStruct`.
      names: "features", or paths of modules.
      images: f[B, ...]; only the shape counts. Without them, shapes are found as in `channels`.

    Raises:
      ValueError: there is no intermediate of such a name, or its size cannot be found.
    """
    plain, old = take(variables)
    found = channels(model, plain, images)
    for name in names:
        if name not in found:
            raise ValueError(
                f"{type(model).__name__} has no intermediate {name!r} to mask; valid are "
                f"{', '.join(sorted(found))}"
            )
    dtype = jax.tree.leaves(plain["params"])[0].dtype
    new = {name: jnp.ones(found[name], dtype) for name in names}
    return {**plain, COLLECTION: {**new, **old}}


def channels(
    model: nn.Module, variables: Variables, images: jax.Array | None = None
) -> dict[str, int]:
    """Name -> channels of every intermediate that can be masked; nothing is computed.

    Without images a pass is tried with some of a usual form, in which every layer whose kernel
    asks for another input gets one of that shape.

    Args:
      model: linen module.
      variables: its collections; only shapes count.
      images: f[B, ...]; only the shape counts.

    Raises:
      ValueError: no pass could be made.
    """
    shapes = GUESSES if images is None else (images.shape,)
    dtype = jax.tree.leaves(variables["params"])[0].dtype
    for shape in shapes:
        try:
            return _note_channels(model, variables, jax.ShapeDtypeStruct(shape, dtype))
        except (flax.errors.FlaxError, ValueError, TypeError, IndexError) as error:
            reason = error
    raise ValueError(
        f"the number of features of {type(model).__name__} was not found "
        f"({' '.join(str(reason).split())}): give variables to which "
        "fedjax_bn.models.masks.with_masks(model, variables, images=images) has added the masks"
    )


def _note_channels(
    model: nn.Module, variables: Variables, images: jax.ShapeDtypeStruct
) -> dict[str, int]:
    found, dense, inside = {}, [], []

    def note(
        call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext
    ) -> Any:
        path, method = context.module.path, context.method_name
        if (path, method) == ((), "classify"):
            inside.append(True)
        if method == "__call__" and args:
            args = (_fitting(context.module, args[0]), *args[1:])
        if calls_dense(context):
            dense.append(args[0].shape[-1])
            if inside:
                found.setdefault(FEATURES, dense[-1])
        output = call(*args, **kwargs)
        if method == "__call__" and path and hasattr(output, "shape"):
            found["/".join(path)] = output.shape[-1]
        elif (path, method) == ((), "features"):
            found[""] = output.shape[-1]
        return output

    with nn.intercept_methods(note):
        jax.eval_shape(lambda v, x: model.apply(v, x, mutable=True)[0], variables, images)
    width = found.pop("", None)
    if shows_halves(model):
        found.setdefault(FEATURES, width)
    elif dense:
        found[FEATURES] = dense[-1]
    return found


def _fitting(layer: nn.Module, x: jax.Array) -> jax.Array:
    """`x`, or zeros of a shape that the layer's variables allow."""
    middle = x.shape[1:-1]
    if isinstance(layer, BatchNorm):
        wanted = layer.get_variable(STATISTICS, "mean").shape[0]
    elif isinstance(layer, nn.Dense):
        wanted = layer.get_variable("params", "kernel").shape[0]
    elif isinstance(layer, nn.Conv):
        kernel = layer.get_variable("params", "kernel")
        wanted = kernel.shape[-2] * layer.feature_group_count
        middle = middle if x.ndim == kernel.ndim else (64,) * (kernel.ndim - 2)
    else:
        return x
    shape = (x.shape[0], *middle, wanted)
    return x if x.shape == shape else jnp.zeros(shape, x.dtype)


def keep_masks(share: SharingRule) -> SharingRule:
    """The sharing rule, by which every client keeps its masks."""

    def rule(variables: Variables) -> PyTree:
        plain, masks = take(variables)
        return {**share(plain), COLLECTION: dict.fromkeys(masks, False)}

    return rule
