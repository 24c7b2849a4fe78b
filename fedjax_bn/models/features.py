"""Computes the features of any model: the inputs of its classifier (see `models.classifier`)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from fedjax_bn.models.classifier import last_dense, shows_features
from fedjax_bn.normalization.calls import Call, intercepting, mode_arguments

# method(model, images, train=False) -> (features f[B, F], outputs), applied instead of `__call__`
_FeaturesMethod = Callable[..., tuple[jax.Array, Any]]
Classify = Callable[[jax.Array], Any]
# around(classify, features) -> outputs, called where the model calls `classify(features)`
Around = Callable[[Classify, jax.Array], Any]


class FeaturesOf(NamedTuple):
    """A model that returns the features f[B, F] of `model`, before they are masked.

    `adaptation.running(FeaturesOf(model))` predicts features instead of logits.
    """

    model: Any


class ClassifiedBy(NamedTuple):
    """A model in which `around` replaces the classifier, which it may call once."""

    model: Any
    around: Around


@dataclass(frozen=True)
class Wrapped:
    """A model that wraps a network and has all of its attributes."""

    network: Any

    @property
    def __wrapped__(self) -> Any:
        """Returns the network, for `inspect.unwrap`."""
        return self.network

    def __getattr__(self, name: str) -> Any:
        """Returns the network's attribute, such as `init`, `__call__` or `features`."""
        # `copy` and `pickle` look up attributes before `network` is set: this ends the recursion.
        if name == "network":
            raise AttributeError(name)
        return getattr(self.network, name)


@dataclass(frozen=True)
class _NamedClassifier(Wrapped):
    """A model with a classifier named by the user; see `with_classifier`."""

    classifier_path: str


def with_classifier(model: Any, path: str) -> Wrapped:
    """Returns the model with the dense layer at `path` as its classifier.

        method = copa(with_classifier(Net(), "head"), optax.sgd(0.1))

    A model may also name its classifier in an attribute `classifier_path`.

    Args:
      model: a linen module, or the result of `from_nnx`.
      path: names that lead to an `nn.Dense` or `nnx.Linear`, such as "head" or "top/Dense_0".
    """
    return _NamedClassifier(model, path)


def features_method(
    model: Any,
    variables: dict[str, Any],
    images: jax.Array,
    *,
    frozen: bool = False,
    mask: jax.Array | None = None,
    around: Around | None = None,
) -> _FeaturesMethod:
    """Returns a function to apply instead of `__call__`; it returns (features, outputs).

        method = features_method(model, variables, images)
        features, logits = model.apply(variables, images, method=method)

    Args:
      model: a linen module, or the result of `from_nnx`.
      variables: its collections; only shapes count.
      images: f[B, ...]; only the shape counts.
      frozen: whether the gradient of the outputs stops at the features.
      mask: f[F], multiplies the features; None for no mask.
      around: called instead of the classifier, which it may call once, with f[..., F].

    Raises:
      ValueError: the model has no method `features` and does not end in a dense layer.
    """

    def pass_on(features: jax.Array, classify: Classify) -> tuple[jax.Array, Any]:
        """The masked features, and the outputs computed from them."""
        if mask is not None:
            features = times(features, mask)
        read = jax.lax.stop_gradient(features) if frozen else features
        if around is None:
            return features, classify(read)
        # `around` may pass float32 to a classifier that computes in half precision.
        return features, around(
            lambda read_features: classify(read_features.astype(features.dtype)), read
        )

    if shows_features(model):

        def shown(model: Any, images: jax.Array, train: bool = False) -> tuple[jax.Array, Any]:
            features = model.features(images, **mode_arguments(model.features, train))
            options = mode_arguments(model.classify, train)
            return pass_on(features, partial(model.classify, **options))

        return shown

    classifier = last_dense(model, variables, images)

    def intercepted(model: Any, images: jax.Array, train: bool = False) -> tuple[jax.Array, Any]:
        seen = []  # created in each trace, so that no tracer outlives its trace

        def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
            if not call.is_dense or call.path != classifier:
                return function(*args, **kwargs)
            features, output = pass_on(args[0], lambda x: function(x, *args[1:], **kwargs))
            seen.append(features)
            return output

        with intercepting(note):
            outputs = model(images, **mode_arguments(model.__call__, train))
        return seen[-1], outputs

    return intercepted


def times(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Multiplies x f[..., C] by a mask f[C], in the dtype of x.

    Raises:
      ValueError: the mask has another size.
    """
    if mask.shape != x.shape[-1:]:
        raise ValueError(
            f"a mask of shape {mask.shape} cannot multiply {x.shape[-1]} channels: add "
            "masks by fedjax_bn.models.masks.with_masks(model, variables, images=images)"
        )
    return x * mask.astype(x.dtype)
