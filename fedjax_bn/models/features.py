"""The features of any model: what its classifier reads.

A model shows them as methods, `features(images) -> f[B, F]` and `classify(features) -> f[B,
classes]`, such that its `__call__` is one after the other. In any other model the classifier is the
dense layer (`nn.Dense`, `nnx.Linear`) whose output the model's outputs are made of, and the
features are its input. `models.sources` finds it; where several layers could be it, the user names
it by `with_classifier`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.models.sources import OTHER, Sources, calls_dense, readable_images, sources_of
from fedjax_bn.normalization import normalize_with, running_statistics
from fedjax_bn.normalization.calls import Call, intercepting, name_of, takes_train
from fedjax_bn.sharing import path_names

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


@dataclass(frozen=True)
class NamedClassifier:
    """A model whose classifier the user names; see `with_classifier`."""

    network: Any
    classifier_path: str

    @property
    def __wrapped__(self) -> Any:
        """The network, which `inspect.unwrap` finds."""
        return self.network

    def __getattr__(self, name: str) -> Any:
        """All else is the network's."""
        if name == "network":  # while it is copied
            raise AttributeError(name)
        return getattr(self.network, name)


def with_classifier(model: Any, path: str) -> NamedClassifier:
    """Returns the model, whose classifier is the dense layer at a path.

        method = copa(with_classifier(Net(), "head"), optax.sgd(0.1))

    A model may also name it itself, in an attribute `classifier_path`.

    Args:
      model: a linen module, or what `from_nnx` makes.
      path: names that lead to an `nn.Dense` or `nnx.Linear`, such as "head" or "top/Dense_0".
    """
    return NamedClassifier(model, path)


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
            if not calls_dense(call) or call.path != classifier:
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


def last_dense(
    model: Any, variables: dict[str, Any], images: jax.Array | None = None
) -> tuple[str, ...]:
    """Returns the path of the dense layer whose output the model's outputs are made of.

    Args:
      model: a linen module, or what `from_nnx` makes.
      variables: its collections; only shapes count.
      images: f[B, ...]; only the shape counts. Without them it is the only dense layer, or the one
        that is found with images of a shape that the model reads.

    Raises:
      ValueError: there is none, several could be it, or another layer is named; the message lists
        the dense layers.
    """
    dense = _dense_layers(variables)
    named = tuple(filter(None, str(getattr(model, "classifier_path", "")).split("/")))
    if not dense:
        raise _not_found(model, _NO_END, dense)
    if named or (images is None and len(dense) == 1):
        found = named or dense[0]
    else:
        form = readable_images(model, variables) if images is None else images
        found = _only(model, sources_of(model, variables, form), dense)
    if found not in dense:
        raise ValueError(
            f"{name_of(model)} has no dense layer {'/'.join(found)!r}{_listed(dense)}: name one of "
            "these by fedjax_bn.models.with_classifier(model, NAME)"
        )
    return found


def _only(model: Any, found: Sources, dense: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The one dense layer of which the outputs are made.

    Raises:
      ValueError: it is none, or not the only one.
    """
    first, *others = sorted(found.outputs) or [OTHER]
    if not others and first != OTHER and found.called[first] == found.shape:
        return first[0]
    if found.shape is None or not others:
        raise _not_found(model, _NO_END, dense)
    parts = ["/".join(path) for path, _ in (first, *others)]
    named = [repr(part) if part else "what no dense layer gives" for part in parts]
    why = f"show which layer classifies: its outputs are made of {' and '.join(named)}"
    raise _not_found(model, why, dense)


_NO_END = "end in an nn.Dense or nnx.Linear"


def _not_found(model: Any, why: str, dense: list[tuple[str, ...]]) -> ValueError:
    name = "name the classifier by fedjax_bn.models.with_classifier(model, NAME), or " * bool(dense)
    return ValueError(
        f"the features before the classifier are needed, but {name_of(model)} does not {why}"
        f"{_listed(dense)}: {name}split its __call__ into methods features(images) -> f[B, F] and "
        "classify(features) -> f[B, classes], as the networks of fedjax_bn.models do"
    )


def _listed(dense: list[tuple[str, ...]]) -> str:
    return f" (its dense layers are {', '.join(map('/'.join, dense))})" if dense else ""


def _dense_layers(variables: dict[str, Any]) -> list[tuple[str, ...]]:
    """The paths of what may be dense layers, by their kernels."""
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    paths = [(path_names(path), leaf) for path, leaf in leaves]
    return [path[:-1] for path, leaf in paths if path[-1] == "kernel" and leaf.ndim == 2]


def require_linear(method: str, model: Any, variables: dict[str, Any], images: jax.Array) -> None:
    """Raises ValueError unless the model's outputs are the output of one dense layer, unchanged.

    Args:
      method: that needs it, to begin a sentence with.
      model, variables, images: as of `last_dense`.
    """
    found = sources_of(model, variables, images)
    if not found.direct or len(found.outputs) != 1 or OTHER in found.outputs:
        raise ValueError(
            f"{method} needs logits f W + b, but {name_of(model)} changes what its classifier "
            "gives: let it return the output of its last nn.Dense or nnx.Linear as it is"
        )


def shows_features(model: Any) -> bool:
    """Whether a model has the methods `features` and `classify`, and names no other classifier."""
    named = getattr(model, "classifier_path", "")
    return not named and hasattr(model, "features") and hasattr(model, "classify")


def features_read(model: Any, variables: dict[str, Any], images: jax.Array | None = None) -> int:
    """Returns how many values of a sample the classifier reads; arguments as of `last_dense`.

    Raises:
      ValueError: the classifier cannot be found.
    """
    if not shows_features(model):
        layer = variables["params"]
        for name in last_dense(model, variables, images):
            layer = layer[name]
        return layer["kernel"].shape[0]
    found: list[int] = []

    def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        if calls_dense(call) and not found:
            found.append(call.kernel.shape[0])
            args = (jnp.zeros((1, found[0]), call.kernel.dtype),)
        return function(*args, **kwargs)

    dtype = jax.tree.leaves(variables["params"])[0].dtype
    features = jax.ShapeDtypeStruct((1, 1), dtype)
    with intercepting(note), normalize_with(running_statistics):
        jax.eval_shape(
            lambda variables, x: model.apply(variables, x, method=classify), variables, features
        )
    if not found:
        raise ValueError(
            f"the classifier of {name_of(model)} cannot be found: its method classify calls no "
            "nn.Dense or nnx.Linear"
        )
    return found[0]


def classify(model: Any, features: jax.Array) -> Any:
    """Returns what a model's own `classify` makes of features f[B, F]."""
    return model.classify(features)
