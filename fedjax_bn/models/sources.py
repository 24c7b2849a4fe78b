"""Which dense layers a model's outputs are made of, read from a trace of the model.

The output of every dense layer (`nn.Dense`, `nnx.Linear`) gets a name in the traced program. A
value is made of the layers whose named outputs lead to it without passing through another layer.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from fedjax_bn.normalization import normalize_with, running_statistics
from fedjax_bn.normalization.calls import Call, intercepting, name_of, takes_train

Source = tuple[tuple[str, ...], int]  # the path of a dense layer, and which of its calls
OTHER: Source = ((), 0)  # whatever is not the output of a dense layer
CHANGED: Source = ((), 1)  # that an output of a layer is computed with
_MARK = "fedjax_bn dense "
_MIXING = ("dot_general", "conv_general_dilated")  # of layers that are not dense ones
_SAME = ("convert_element_type", "copy", "reshape", "squeeze", "optimization_barrier")
_SIDES = (32, 28, 224, 64, 16, 8, 96, 128, 256)  # of images, those that are common


class Sources(NamedTuple):
    """What a model's outputs are made of.

    Attributes:
      outputs: the sources of the outputs.
      direct: whether the outputs are those of their sources, and not computed from them.
      called: the dense layers' calls in order, with the shapes of their outputs.
      shape: that of the outputs; None where they are no single array.
    """

    outputs: frozenset[Source]
    direct: bool
    called: dict[Source, tuple[int, ...]]
    shape: tuple[int, ...] | None


def sources_of(
    model: Any, variables: dict[str, Any], images: Any, method: Callable[..., Any] | None = None
) -> Sources:
    """Traces a model in evaluation mode; nothing is computed.

    Args:
      model: a linen module, or what `from_nnx` makes.
      variables: its collections; only shapes count.
      images: f[B, ...]; only the shape counts.
      method: `method(model, images)` in place of `__call__`.
    """
    called: dict[Source, tuple[int, ...]] = {}

    def mark(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        output = function(*args, **kwargs)
        if not calls_dense(call):
            return output
        source = call.path, sum(path == call.path for path, _ in called)
        called[source] = output.shape
        return checkpoint_name(output, f"{_MARK}{len(called) - 1}")

    def outputs(variables: dict[str, Any], images: Any) -> Any:
        return model.apply(
            variables, images, method=method, **takes_train(method or model.__call__, False)
        )

    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (variables, images))
    with intercepting(mark), normalize_with(running_statistics):
        program, shapes = jax.make_jaxpr(outputs, return_shape=True)(*like)
    calls, last = list(called), len(program.jaxpr.invars) - 1
    given = [frozenset({OTHER} if place == last else ()) for place in range(last + 1)]
    found = _made_of(program.jaxpr, given, calls)
    made = frozenset[Source]().union(*found)
    shape = getattr(shapes, "shape", None)
    return Sources(made - {CHANGED}, CHANGED not in made, called, shape)


def _made_of(
    jaxpr: Any, given: list[frozenset[Source]], calls: list[Source]
) -> list[frozenset[Source]]:
    """The sources of each output of a program, of those of its inputs."""
    known = dict(zip(jaxpr.invars, given, strict=True))

    def sources(value: Any) -> frozenset[Source]:
        return frozenset() if hasattr(value, "val") else known.get(value, frozenset())

    for equation in jaxpr.eqns:
        inputs = [sources(value) for value in equation.invars]
        kind, inner = equation.primitive.name, list(_programs(equation.params))
        name = str(equation.params.get("name", ""))
        if kind == "name" and name.startswith(_MARK):
            made = [frozenset({calls[int(name.removeprefix(_MARK))]})]
        elif len(inner) == 1 and _fits(inner[0], equation):
            made = _made_of(inner[0], inputs, calls)
        elif inner or kind in _MIXING:
            made = [frozenset({OTHER})] * len(equation.outvars)
        else:
            changed = frozenset[Source]() if kind in _SAME else frozenset({CHANGED})
            made = [changed.union(*inputs)] * len(equation.outvars)
        known |= zip(equation.outvars, made, strict=True)
    return [sources(value) for value in jaxpr.outvars]


def _programs(parameters: dict[str, Any]) -> Iterator[Any]:
    """The programs within an equation."""
    for value in parameters.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each


def _fits(program: Any, equation: Any) -> bool:
    lengths = len(program.invars), len(program.outvars)
    return lengths == (len(equation.invars), len(equation.outvars))


def calls_dense(call: Call) -> bool:
    """Whether a call is that of a dense layer."""
    return call.kernel is not None and call.method == "__call__"


def readable_images(model: Any, variables: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """Returns the form of images that a model reads, tried out with traces.

    Args:
      model: a linen module, or what `from_nnx` makes.
      variables: its collections; only shapes count.

    Raises:
      ValueError: none of the forms that are tried is one.
    """
    leaves = [leaf for leaf in jax.tree.leaves(variables["params"]) if leaf.ndim > 1]
    maps = any(leaf.ndim == 4 for leaf in leaves)
    channels = dict.fromkeys(leaf.shape[-2] for leaf in leaves if not maps or leaf.ndim == 4)
    sides = dict.fromkeys((*_SIDES, *range(1, 65)))
    flat = [(count,) for count in channels]
    shapes = [(side, side, count) for side in sides for count in channels]
    for shape in (*shapes, *flat) if maps else (*flat, *shapes):
        images = jax.ShapeDtypeStruct((2, *shape), leaves[0].dtype)
        try:
            sources_of(model, variables, images)
        except Exception:  # whatever a user's model raises for images that it does not read
            continue
        return images
    raise ValueError(
        f"the classifier of {name_of(model)} cannot be found without images: name it by "
        "fedjax_bn.models.with_classifier(model, NAME), or give the model methods features and "
        "classify, as the networks of fedjax_bn.models have them"
    )
