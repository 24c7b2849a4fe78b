"""Feature masks: arrays that multiply intermediates of any model, channel by channel.

They are stored in the collection `mask`: name -> f[C]. The mask "features" multiplies the inputs of
the classifier (see `fedjax_bn.models.classifier`), or in a detector the maps that its prediction
layers read. Any other name is the path of a module, such as "layer4_1", whose output is multiplied.
The model itself does not change: `models.forward.forward` applies the masks in the variables.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.models.classifier import features_method, sizes_of
from fedjax_bn.normalization import normalize_with, running_statistics
from fedjax_bn.normalization.calls import Call, intercepting, network_name, shapes_of
from fedjax_bn.sharing import Variables, path_names, without

Masks = dict[str, jax.Array]

COLLECTION = "mask"
FEATURES = "features"


def with_masks(
    model: Any,
    variables: Variables,
    names: Iterable[str] = (FEATURES,),
    images: jax.Array | None = None,
) -> Variables:
    """Adds masks of ones to the variables; existing masks are unchanged.

    Args:
      model: a linen module, or the result of `from_nnx`.
      variables: its collections, arrays or `jax.ShapeDtypeStruct`.
      names: "features", or paths of modules. For a model with `taps` (name -> channels), such as a
        detector, "features" means all taps.
      images: f[B, ...]; only the shape counts. Without images, the number of channels of a layer's
        output is the last axis of its kernel, scale or bias.

    Raises:
      ValueError: there is no intermediate of this name, or no classifier that reads "features".
    """
    plain, masks = without(variables, COLLECTION), variables.get(COLLECTION, {})
    taps = getattr(model, "taps", {})
    # A detector has no classifier: its features are all maps that its predictions read.
    named = [layer for name in names for layer in (taps if name == FEATURES and taps else (name,))]
    missing = [name for name in named if name not in masks]
    if images is None:
        channels = dict(taps)
        for path, leaf in jax.tree.leaves_with_path(plain["params"]):
            *module, kind = path_names(path)
            # Their last axis is the layer's number of output channels.
            if kind in ("kernel", "scale", "bias"):
                channels["/".join(module)] = leaf.shape[-1]
    else:
        channels = _channels(model, plain, images)
    if FEATURES in missing and FEATURES not in channels:
        channels[FEATURES] = sizes_of(model, plain, images).features
    if unknown := [name for name in missing if name not in channels]:
        choice = f"choose {', '.join(sorted({*channels, FEATURES}))}, or give with_masks images"
        raise ValueError(f"{network_name(model)} has no {unknown[0]!r} to mask: {choice}")
    dtype = jax.tree.leaves(plain["params"])[0].dtype
    ones = {name: jnp.ones(channels[name], dtype) for name in missing}
    return {**plain, COLLECTION: ones | {**masks}}


def _channels(model: Any, variables: Variables, images: jax.Array) -> dict[str, int]:
    """Name -> channels of every intermediate that can be masked."""
    channels = {}

    def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        output = function(*args, **kwargs)
        if call.method == "__call__" and call.path and hasattr(output, "shape"):
            channels["/".join(call.path)] = output.shape[-1]
        return output

    with intercepting(note), normalize_with(running_statistics):
        shapes_of(model, variables, images)
    try:
        method = features_method(model, variables, images)
    except ValueError:  # the model does not end in a dense layer, so only modules can be masked
        return channels
    features, _ = jax.eval_shape(
        lambda variables, images: model.apply(variables, images, method=method), variables, images
    )
    return channels | {FEATURES: features.shape[-1]}
