"""Finds the layer of a model that classifies, and computes the features that it reads.

A model may define its classifier by two methods, `features(images) -> f[B, F]` and
`classify(features) -> f[B, classes]`, which `__call__` composes. In any other model the classifier
is the dense layer (`nn.Dense`, `nnx.Linear`) from whose output the model's outputs are computed. A
trace finds this layer: the output of every dense layer gets a name in the traced program, and the
sources of a value are the named outputs that reach it without passing through another layer. If
there are several candidates, the user names one by `models.with_classifier`. A named layer may also
be the last convolution of a network for masks, whose features are the map f[B, H, W, F] before it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fedjax_bn.normalization import normalize_with, running_statistics
from fedjax_bn.normalization.calls import Call, Path, intercepting, mode_arguments, network_name
from fedjax_bn.sharing import SharingRule, Variables, path_names

# method(model, images, train=False) -> (features f[B, F], outputs), applied instead of `__call__`
_FeaturesMethod = Callable[..., tuple[jax.Array, Any]]
Classify = Callable[[jax.Array], Any]
# around(classify, features) -> outputs, called where the model calls `classify(features)`
Around = Callable[[Classify, jax.Array], Any]
_Source = tuple[Path, int]  # the path of a dense layer and the number of its call
_OTHER: _Source = ((), 0)  # a value that no dense layer returns
_CHANGED: _Source = ((), 1)  # a computation on the output of a layer
_MARK = "fedjax_bn dense "
_MIXING = ("dot_general", "conv_general_dilated")  # products of layers that are not dense
# Operations that leave logits of the form f W + b, such as a final cast to float32.
_SAME = ("convert_element_type", "copy", "reshape", "squeeze", "optimization_barrier")
_SIDES = dict.fromkeys((32, 28, 224, 64, 16, 8, 96, 128, 256, *range(1, 65)))  # common first


class FeaturesOf(NamedTuple):
    """A model that returns the features f[B, F] of `model` instead of logits, before any mask."""

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
        # Not `self.network`: `copy` and `pickle` look up attributes before it is set.
        return getattr(object.__getattribute__(self, "network"), name)


@dataclass(frozen=True)
class _NamedClassifier(Wrapped):
    classifier_path: str


def with_classifier(model: Any, path: str) -> Wrapped:
    """Returns the model with the dense layer at `path`, such as "top/Dense_0", as its classifier.

        method = copa(with_classifier(Net(), "head"), optax.sgd(0.1))

    A model may also name its classifier in an attribute `classifier_path`.
    """
    return _NamedClassifier(model, path)


class Sizes(NamedTuple):
    """The sizes of a model's classifier."""

    features: int  # F, the number of inputs per sample
    classes: int  # the number of outputs per sample
    dtype: jnp.dtype  # dtype of the model's parameters
    path: Path  # names of the modules that lead to its dense layer; () if it has several


def sizes_of(model: Any, variables: Variables, images: jax.Array | None = None) -> Sizes:
    """Returns the sizes of a model's classifier.

    Args:
      model: a linen module, or the result of `from_nnx`.
      variables: its collections; only shapes count.
      images: f[B, ...]; only the shape counts. Without images, a model with several dense layers is
        traced with images of a shape that it accepts (`readable_images`).

    Raises:
      ValueError: no dense layer makes the outputs, or several could, or the named classifier is no
        dense layer; the message lists the dense layers.
    """
    dtype = jax.tree.leaves(variables["params"])[0].dtype
    if not _shows_features(model):
        path = _last_dense(model, variables, images)
        features, classes = _dense_kernels(variables)[path].shape
        return Sizes(features, classes, dtype, path)
    ((path, features), *more_layers), outputs = _classify_traced(model, variables)
    return Sizes(features, outputs.shape[-1], dtype, () if more_layers else path)


def all_but_head(model: Any) -> SharingRule:
    """Returns the rule that keeps the classifier local (FedPer, Arivazhagan et al. 2019).

    The head is all dense layers in `classify`, or the dense layer that makes the outputs, or the
    layer that `models.with_classifier` or the model names, such as the last convolution of `UNet`.
    The rule raises ValueError if there is no classifier.
    """

    def rule(variables: Variables) -> Any:
        if _shows_features(model):
            heads = {path for path, _ in _classify_traced(model, variables)[0]}
        else:
            heads = {_classifier(model, variables, None)}
        return jax.tree.map_with_path(
            lambda path, _: path[0].key != "params" or path_names(path[1:-1]) not in heads,
            variables,
        )

    return rule


def only_head(model: Any) -> SharingRule:
    """Returns the rule that shares the classifier alone (LG-FedAvg, Liang et al. 2020).

    It is the complement of `all_but_head`: the layers before, with their statistics, stay local.
    """
    keeps_head = all_but_head(model)
    return lambda variables: jax.tree.map(lambda shared: not shared, keeps_head(variables))


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
      model, variables, images: as in `sizes_of`, with its errors.
      frozen: whether the gradient of the outputs stops at the features.
      mask: f[F], multiplies the features; None for no mask.
      around: called instead of the classifier, which it may call once, with f[..., F].
    """

    def pass_on(features: jax.Array, classify: Classify) -> tuple[jax.Array, Any]:
        if mask is not None:
            features = times(features, mask)
        read = jax.lax.stop_gradient(features) if frozen else features
        if around is None:
            return features, classify(read)
        # `around` may pass float32 to a classifier that computes in half precision.
        return features, around(lambda x: classify(x.astype(features.dtype)), read)

    if _shows_features(model):

        def shown(model: Any, images: jax.Array, train: bool = False) -> tuple[jax.Array, Any]:
            features = model.features(images, **mode_arguments(model.features, train))
            options = mode_arguments(model.classify, train)
            return pass_on(features, partial(model.classify, **options))

        return shown

    classifier = _classifier(model, variables, images)

    def intercepted(model: Any, images: jax.Array, train: bool = False) -> tuple[jax.Array, Any]:
        seen = []  # created in each trace, so that no tracer outlives its trace

        def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
            if call.method != "__call__" or call.path != classifier:
                return function(*args, **kwargs)
            features, output = pass_on(args[0], lambda x: function(x, *args[1:], **kwargs))
            seen.append(features)
            return output

        with intercepting(note):
            outputs = model(images, **mode_arguments(model.__call__, train))
        return seen[-1], outputs

    return intercepted


def times(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Multiplies x f[..., C] by a mask f[C], in the dtype of x; refuses masks of other sizes."""
    if mask.shape != x.shape[-1:]:
        problem = f"a mask of shape {mask.shape} cannot multiply {x.shape[-1]} channels"
        raise ValueError(f"{problem}: add masks by feature_masks.with_masks(..., images=images)")
    return x * mask.astype(x.dtype)


def entropy(logits: jax.Array) -> jax.Array:
    """Returns the entropy f[...] of softmax(logits f[..., C]), in [0, ln C]."""
    logs = jax.nn.log_softmax(logits)
    return -(jnp.exp(logs) * logs).sum(-1)


def _dense_kernels(variables: Variables) -> dict[Path, jax.Array]:
    leaves = jax.tree.leaves_with_path(variables["params"])
    matrices = {path_names(path): leaf for path, leaf in leaves if leaf.ndim == 2}
    return {path[:-1]: leaf for path, leaf in matrices.items() if path[-1] == "kernel"}


def _classifier(model: Any, variables: Variables, images: jax.Array | None) -> Path:
    """The path of the classifier, which need not be dense if the model names it."""
    path = tuple(str(getattr(model, "classifier_path", "")).split("/"))
    leaves = jax.tree.leaves_with_path(variables["params"])
    named = any(path_names(leaf) == (*path, "kernel") for leaf, _ in leaves)
    return path if named else _last_dense(model, variables, images)


def _last_dense(model: Any, variables: Variables, images: jax.Array | None) -> Path:
    """The path of the dense layer from whose output the model's outputs are computed."""
    dense = list(_dense_kernels(variables))
    path = tuple(filter(None, str(getattr(model, "classifier_path", "")).split("/")))
    origin = f"named {'/'.join(path)!r}" if path else "no nn.Dense or nnx.Linear"
    if not path and images is None and len(dense) == 1:
        return dense[0]
    if not path and dense:
        form = readable_images(model, variables) if images is None else images
        sources = _sources_of(model, variables, form)
        candidates = sorted(sources.outputs)
        # After a layer of another shape something changes what it gives.
        if len(candidates) == 1 and sources.called.get(candidates[0]) == sources.shape:
            path = candidates[0][0]
        parts = [repr("/".join(path)) if path else "no dense layer" for path, _ in candidates]
        origin = f"made of {' and '.join(parts) or 'no dense layer'}"
    if path not in dense:
        layers = ", ".join(map("/".join, dense)) or "none"
        raise ValueError(
            f"the classifier of {network_name(model)} is {origin}: name one of its dense layers "
            f"({layers}) by models.with_classifier(model, NAME)"
        )
    return path


def require_linear(method: str, model: Any, variables: Variables, images: jax.Array) -> None:
    """Raises ValueError unless the outputs, which `method` reads, are those of one dense layer."""
    sources = _sources_of(model, variables, images)
    if not sources.direct or len(sources.outputs) != 1 or _OTHER in sources.outputs:
        problem = f"{method} needs logits f W + b, but {network_name(model)} changes them"
        raise ValueError(f"{problem}: let it return the output of its last dense layer as it is")


def classifier_path(method: str, model: Any, variables: Variables) -> tuple[str, ...]:
    """Returns the path of the dense layer that classifies; ValueError if there are several."""
    if path := sizes_of(model, variables).path:
        return path
    problem = f"{method} needs a classifier of one dense layer, not {network_name(model)}'s several"
    raise ValueError(f"{problem}: name one by models.with_classifier(model, NAME)")


def _shows_features(model: Any) -> bool:
    """Whether a model has methods `features` and `classify` and no `classifier_path`."""
    unnamed = not getattr(model, "classifier_path", "")
    return unnamed and hasattr(model, "features") and hasattr(model, "classify")


def readable_images(model: Any, variables: Variables) -> jax.ShapeDtypeStruct:
    """Returns the first shape of images that a model can be traced with, or raises ValueError."""
    leaves = [leaf for leaf in jax.tree.leaves(variables["params"]) if leaf.ndim > 1]
    # Kernels of convolutions show that the model reads images, and how many channels.
    maps = any(leaf.ndim == 4 for leaf in leaves)
    channels = dict.fromkeys(leaf.shape[-2] for leaf in leaves if not maps or leaf.ndim == 4)
    flat = [(2, count) for count in channels]
    squares = [(2, side, side, count) for side in _SIDES for count in channels]
    for shape in (*squares, *flat) if maps else (*flat, *squares):
        images = jax.ShapeDtypeStruct(shape, leaves[0].dtype)
        try:
            _sources_of(model, variables, images)
        except Exception:  # a user's model may raise anything for images of the wrong shape
            continue
        return images
    problem = f"the classifier of {network_name(model)} cannot be found without images"
    raise ValueError(f"{problem}: name it by models.with_classifier(model, NAME)")


def _classify_traced(model: Any, variables: Variables) -> tuple[list[tuple[Path, int]], Any]:
    """Path and number of inputs of each dense layer in `classify`, and the shapes of its output."""
    dtype = jax.tree.leaves(variables["params"])[0].dtype
    layers: list[tuple[Path, int]] = []

    def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        if call.is_dense:
            if not layers:  # the trace begins with a single feature, because F is not known yet
                args = (jnp.zeros((2, call.kernel.shape[0]), call.kernel.dtype),)
            layers.append((call.path, call.kernel.shape[0]))
        return function(*args, **kwargs)

    classify = partial(model.apply, method=lambda model, x: model.classify(x))
    with intercepting(note), normalize_with(running_statistics):
        outputs = jax.eval_shape(classify, variables, jax.ShapeDtypeStruct((2, 1), dtype))
    if not layers:
        raise ValueError(f"the method classify of {network_name(model)} must call a dense layer")
    return layers, outputs


class _Sources(NamedTuple):
    """The dense layers from which a model's outputs are computed."""

    outputs: frozenset[_Source]  # the sources of the outputs
    direct: bool  # whether the outputs equal those of their sources, up to operations in `_SAME`
    # the calls of dense layers in order, with the shapes of their outputs
    called: dict[_Source, tuple[int, ...]]
    shape: tuple[int, ...] | None  # shape of the model's output; None unless it is a single array


def _sources_of(model: Any, variables: Variables, images: Any) -> _Sources:
    """Finds the sources of a model's outputs, by a trace in evaluation mode."""
    called: dict[_Source, tuple[int, ...]] = {}

    def mark(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        output = function(*args, **kwargs)
        if not call.is_dense:
            return output
        # A layer that is called twice is two sources.
        source = call.path, sum(path == call.path for path, _ in called)
        called[source] = output.shape
        return checkpoint_name(output, f"{_MARK}{len(called) - 1}")

    outputs = partial(model.apply, **mode_arguments(model.__call__, False))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (variables, images))
    with intercepting(mark), normalize_with(running_statistics):
        program, shapes = jax.make_jaxpr(outputs, return_shape=True)(*like)
    images_place = len(program.jaxpr.invars) - 1  # the images; all inputs before it are variables
    input_sources = [frozenset[_Source]()] * images_place + [frozenset({_OTHER})]
    sources = frozenset[_Source]().union(*_made_of(program.jaxpr, input_sources, list(called)))
    shape = getattr(shapes, "shape", None)
    return _Sources(sources - {_CHANGED}, _CHANGED not in sources, called, shape)


def _made_of(
    jaxpr: Any, input_sources: list[frozenset[_Source]], calls: list[_Source]
) -> list[frozenset[_Source]]:
    """The sources of each output of a program, given the sources of its inputs."""
    sources_by_variable = dict(zip(jaxpr.invars, input_sources, strict=True))

    def sources(value: Any) -> frozenset[_Source]:
        # A literal, recognized by its `val`, is not hashable and so cannot be looked up.
        return frozenset() if hasattr(value, "val") else sources_by_variable.get(value, frozenset())

    for equation in jaxpr.eqns:
        inputs = [sources(value) for value in equation.invars]
        kind, inner = equation.primitive.name, list(_programs(equation.params))
        name = str(equation.params.get("name", ""))
        forms = [(len(program.invars), len(program.outvars)) for program in inner]
        if kind == "name" and name.startswith(_MARK):
            outputs = [frozenset({calls[int(name.removeprefix(_MARK))]})]
        # A program with these inputs and outputs, such as the body of a `jit`.
        elif forms == [(len(equation.invars), len(equation.outvars))]:
            outputs = _made_of(inner[0], inputs, calls)
        elif inner or kind in _MIXING:
            # Loops and branches are not followed; no dense layer counts as their source.
            outputs = [frozenset({_OTHER})] * len(equation.outvars)
        else:
            changed = frozenset[_Source]() if kind in _SAME else frozenset({_CHANGED})
            outputs = [changed.union(*inputs)] * len(equation.outvars)
        sources_by_variable |= zip(equation.outvars, outputs, strict=True)
    return [sources(value) for value in jaxpr.outvars]


def _programs(parameters: dict[str, Any]) -> Iterator[Any]:
    """The programs in the parameters of an equation, such as the body of a `jit`."""
    for value in parameters.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part
