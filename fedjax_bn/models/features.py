"""The features of any model: what its classifier reads.

A model shows them as methods, `features(images) -> f[B, F]` and `classify(features) -> f[B,
classes]`, such that its `__call__` is one after the other. Of any other model the classifier is the
last dense layer that a pass calls (`nn.Dense`, `nnx.Linear`), and the features are its input.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from fedjax_bn.normalization import normalize_with, running_statistics
from fedjax_bn.normalization.calls import Call, intercepting, name_of, shapes_of, takes_train

# method(model, images, train=False) -> (features f[B, F], outputs), in place of `__call__`
FeaturesMethod = Callable[..., tuple[jax.Array, Any]]
Classify = Callable[[jax.Array], Any]
# around(classify, features) -> outputs, in place of `classify(features)`
Around = Callable[[Classify, jax.Array], Any]


class FeaturesOf(NamedTuple):
    """A model in the place of another one, whose outputs are the other's features f[B, F].

    `adaptation.running(FeaturesOf(model))` predicts features where that of the model predicts
    logits. They are those before their own mask.
    """

    model: Any


class ClassifiedBy(NamedTuple):
    """A model in the place of another one, whose classifier is called by `around`, once or not."""

    model: Any
    around: Around


def features_method(
    model: Any,
    variables: dict[str, Any],
    images: jax.Array,
    *,
    frozen: bool = False,
    mask: jax.Array | None = None,
    around: Around | None = None,
) -> FeaturesMethod:
    """A function to be applied in place of `__call__` that returns (features, outputs).

        method = features_method(model, variables, images)
        features, logits = model.apply(variables, images, method=method)

    Args:
      model: a linen module, or what `from_nnx` makes.
      variables: its collections; only shapes count.
      images: f[B, ...]; only the shape counts.
      frozen: whether the gradient of the outputs stops at the features.
      mask: f[F], what multiplies the features; None for nothing.
      around: what stands in the place of the classifier and may call it, once, with f[..., F].

    Raises:
      ValueError: the model shows no features and does not end in a dense layer.
    """

    def masked(features: jax.Array) -> jax.Array:
        return features if mask is None else times(features, mask)

    stop = jax.lax.stop_gradient if frozen else lambda x: x
    around = around or (lambda classify, features: classify(features))

    def replaced(classify: Classify, features: jax.Array) -> Any:
        """What is given in place of features is read in their dtype, which may be a half one."""
        return around(lambda given: classify(given.astype(features.dtype)), features)

    if shows_features(model):

        def shown(model: Any, images: jax.Array, train: bool = False) -> tuple[jax.Array, Any]:
            features = masked(model.features(images, **takes_train(model.features, train)))
            classify = partial(model.classify, **takes_train(model.classify, train))
            return features, replaced(classify, stop(features))

        return shown

    classifier = last_dense(model, variables, images)

    def found(model: Any, images: jax.Array, train: bool = False) -> tuple[jax.Array, Any]:
        seen = []

        def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
            if not _calls_dense(call) or call.path != classifier:
                return function(*args, **kwargs)
            seen.append(masked(args[0]))
            classify = lambda x: function(x, *args[1:], **kwargs)  # noqa: E731
            return replaced(classify, stop(seen[-1]))

        with intercepting(note):
            outputs = model(images, **takes_train(model.__call__, train))
        return seen[-1], outputs

    return found


def times(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x f[..., C] times a mask f[C], in the dtype of x.

    Raises:
      ValueError: the mask has another size.
    """
    if mask.shape != x.shape[-1:]:
        raise ValueError(
            f"a mask of shape {mask.shape} meets an intermediate of {x.shape[-1]} channels: add "
            "masks by fedjax_bn.models.masks.with_masks(model, variables, images=images)"
        )
    return x * mask.astype(x.dtype)


def last_dense(model: Any, variables: dict[str, Any], images: jax.Array) -> tuple[str, ...]:
    """The path of the last dense layer that a pass calls, whose output has the outputs' shape.

    Raises:
      ValueError: there is none, or the model's output has another shape than its output.
    """
    called = []

    def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        output = function(*args, **kwargs)
        if _calls_dense(call):
            called.append((call.path, output.shape))
        return output

    with intercepting(note), normalize_with(running_statistics):
        outputs = shapes_of(model, variables, images)
    if not called or called[-1][1] != getattr(outputs, "shape", None):
        raise ValueError(
            f"the features before the classifier are needed, but {name_of(model)} does not "
            "end in an nn.Dense or nnx.Linear: split its __call__ into methods features(images) -> "
            "f[B, F] and classify(features) -> f[B, classes], as the networks of fedjax_bn.models "
            "do"
        )
    return called[-1][0]


def shows_features(model: Any) -> bool:
    """Whether a model has the methods `features` and `classify`."""
    return hasattr(model, "features") and hasattr(model, "classify")


def _calls_dense(call: Call) -> bool:
    return call.kernel is not None and call.method == "__call__"
