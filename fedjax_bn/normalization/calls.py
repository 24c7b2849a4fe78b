"""What happens when a model calls its layers: one way to look at it in linen and in nnx.

A *handler* is a function `handler(function, call, args, kwargs) -> output` that stands around every
call of a module and usually returns `function(*args, **kwargs)`. `intercepting(handler)` puts it
there for linen models and for those of `models.from_nnx`; `normalize_with` is the handler that
hands a statistics rule to all batch norms.

Served are our `BatchNorm`, flax's `nn.BatchNorm` and `nnx.BatchNorm`. Flax's own keep flax's
conventions: momentum 0.99 by default, the *biased* variance as running variance, moments in at
least float32. Their `use_running_average` does not count: whether a pass trains says who makes the
pass. Moments are taken in two passes, whatever `use_fast_variance` says.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import promote
from fedjax_bn.normalization.batch_norm import BatchNorm, layer_of, store
from fedjax_bn.normalization.layer import (
    Layer,
    Statistics,
    StatisticsRule,
    is_spatial,
    normalize,
    statistics_of,
)

SERVED = "fedjax_bn.normalization.BatchNorm, flax.linen.BatchNorm or flax.nnx.BatchNorm"
Path = tuple[str, ...]


class Call(NamedTuple):
    """A call of a module, of linen or of nnx.

    Attributes:
      path: the names that lead to the module, () for the model itself.
      method: name of the method, `__call__` mostly; calls of other methods are seen in linen only.
      kernel: f[inputs, outputs] of a dense layer, () while it is being made; None for another one.
      normalize: `normalize(function, args, kwargs, rule, valid) -> y` of a batch norm that is
        served, None for any other module.
    """

    path: Path
    method: str
    kernel: Any
    normalize: Callable[..., jax.Array] | None


Handler = Callable[[Callable[..., Any], Call, tuple, dict[str, Any]], Any]

Concerns = Callable[[Call], bool]

_handlers: ContextVar[tuple[tuple[Handler, Concerns], ...]] = ContextVar("handlers", default=())


@contextmanager
def intercepting(handler: Handler, concerns: Concerns = lambda call: True) -> Iterator[None]:
    """A context in which the handler stands around calls of modules.

    It acts while a model is traced, so it works under `jit`, `vmap`, `scan` and `shard_map` and
    costs nothing at run time.

    Args:
      handler: see above.
      concerns: whether it stands around a call; by default around every one.
    """

    def linen(function: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        call = _linen_call(context.module, context.method_name)
        return (
            handler(function, call, args, kwargs) if concerns(call) else function(*args, **kwargs)
        )

    token = _handlers.set((*_handlers.get(), (handler, concerns)))
    try:
        with nn.intercept_methods(linen):
            yield
    finally:
        _handlers.reset(token)


def through_handlers(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
    """Calls a module that no framework intercepts, through the handlers of now."""
    for handler, concerns in _handlers.get():
        if concerns(call):
            function = partial(_handled, handler, function, call)
    return function(*args, **kwargs)


def _handled(handler: Handler, function: Callable, call: Call, *args: Any, **kwargs: Any) -> Any:
    return handler(function, call, args, kwargs)


def normalize_with(
    statistics: StatisticsRule | None = None,
    valid: jax.Array | None = None,
    *,
    owners: frozenset[Path] = frozenset(),
) -> AbstractContextManager:
    """Hands a statistics rule and a mask of valid samples to every batch norm applied inside.

        with normalize_with(running_statistics):
            logits = model.apply(variables, images)

    Args:
      statistics: the rule; None for the batch's own statistics in a pass that may move the running
        ones, else these.
      valid: bool[B], the samples that count; None for all.
      owners: paths of the modules that own running statistics (`sharing.batch_norm_paths`); one of
        them that is not served is refused.

    Raises:
      ValueError: while tracing, where a rule does not reach an owner.
    """

    def concerns(call: Call) -> bool:
        if call.normalize:
            return call.method == "__call__"
        return statistics is not None and call.path in owners

    def hand_over(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        if call.normalize:
            return call.normalize(function, args, kwargs, statistics, valid)
        raise ValueError(
            f"the module {'/'.join(call.path) or 'at the root'!r} has running statistics of "
            f"its own, which no statistics rule reaches: use {SERVED} there, or a method and "
            "an adaptation that hand over no rule, such as fedbn and running"
        )

    return intercepting(hand_over, concerns)


def spatial_layers(
    model: Any, variables: dict, images: jax.Array | jax.ShapeDtypeStruct
) -> dict[str, int]:
    """Name -> channels C of every batch norm that sees spatial axes; nothing is computed.

    Args:
      model: a model whose batch norms are served.
      variables: its collections, arrays or `jax.ShapeDtypeStruct`.
      images: f[B, ...] as the model reads them, an array or a `jax.ShapeDtypeStruct`.
    """
    found = {}

    def note(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        del valid
        if is_spatial(x):
            found[layer.name] = x.shape[-1]
        return Statistics(layer.mean, layer.var)

    with normalize_with(note):
        shapes_of(model, variables, images)
    return found


def in_forward_order(
    names: Iterable[str], model: Any, variables: dict, images: jax.Array
) -> list[str]:
    """Returns names of modules in the order in which a forward pass first calls them.

    Trees of variables and all that `jit` returns are sorted by name, where a ResNet's first layer
    comes last. Nothing is computed. Modules that are not called come last.

    Args:
      names: such as "layer1_0/norm1"; "." is the model itself.
      model, variables, images: as in `spatial_layers`.
    """
    found: dict[str, int] = {}

    def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        found.setdefault("/".join(call.path) or ".", len(found))
        return function(*args, **kwargs)

    with intercepting(note):
        shapes_of(model, variables, images)
    return sorted(names, key=lambda name: found.get(name, len(found)))


def shapes_of(model: Any, variables: dict, images: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """The shapes of a model's outputs in evaluation mode; nothing is computed."""

    def outputs(variables: dict, images: jax.Array) -> Any:
        return model.apply(variables, images, **takes_train(model.__call__, False))

    return jax.eval_shape(outputs, variables, images)


def takes_train(function: Callable[..., Any], train: bool) -> dict[str, bool]:
    """{"train": train} for a function that has such a parameter, else {}."""
    return {"train": train} if "train" in inspect.signature(function).parameters else {}


def name_of(model: Any) -> str:
    """The name of a model's class, for a sentence."""
    return type(inspect.unwrap(model)).__name__


def flax_output(module: Any, layer: Layer, x: jax.Array, given: Statistics, affine: tuple) -> Any:
    """The output of one of flax's own batch norms, in the dtype that flax gives it."""
    y = normalize(x, given, layer.epsilon, *affine)
    leaves = [leaf.dtype for leaf in affine if leaf is not None]
    return y.astype(module.dtype or promote(x.dtype, *leaves))


def flax_input(module: Any, path: Path, args: tuple, kwargs: dict) -> jax.Array:
    """The input f[B, ..., C] of a call of one of flax's own batch norms.

    Raises:
      ValueError: the call is one that statistics rules do not know.
    """
    options = dict(zip(("x", "use_running_average"), args, strict=False)) | kwargs
    x = options["x"]
    wrong = None
    if module.axis not in (-1, x.ndim - 1):
        wrong = f"axis={module.axis}: put the channels last"
    elif module.axis_name is not None:
        wrong = f"axis_name={module.axis_name!r}: leave it out, a mesh with an axis 'batch' does it"
    elif options.get("mask") is not None:
        wrong = "a mask of its own: leave it out, the valid samples of a batch are handed over"
    if wrong:
        name = "/".join(path)
        raise ValueError(f"statistics rules do not know the batch norm {name!r} with {wrong}")
    return x


def _linen_call(module: nn.Module, method: str) -> Call:
    kernel = normalize_by = None
    if isinstance(module, nn.Dense):
        kernel = module.get_variable("params", "kernel", ())
    elif isinstance(module, BatchNorm):
        normalize_by = _hand_to_ours
    elif isinstance(module, nn.BatchNorm) and _calls_flax(module):
        normalize_by = partial(_normalize_linen, module)
    return Call(module.path, method, kernel, normalize_by)


def _calls_flax(module: nn.BatchNorm) -> bool:
    """Whether a call of the module is flax's own, not that of a class derived from it."""
    return type(module).__call__ is nn.BatchNorm.__call__


def _hand_to_ours(
    function: Callable,
    args: tuple,
    kwargs: dict,
    rule: StatisticsRule | None,
    valid: jax.Array | None,
) -> jax.Array:
    return function(*args, **{"statistics": rule, "valid": valid} | kwargs)


def _normalize_linen(
    module: nn.BatchNorm,
    function: Callable,
    args: tuple,
    kwargs: dict,
    rule: StatisticsRule | None,
    valid: jax.Array | None,
) -> jax.Array:
    x = flax_input(module, module.path, args, kwargs)
    if module.is_initializing():
        function(jnp.zeros_like(x), use_running_average=True)  # makes the variables
    layer = layer_of(module, unbiased=False)
    given = statistics_of(rule, layer, x, valid)
    store(module, layer, given)
    affine = tuple[Any, ...](module.get_variable("params", name) for name in ("scale", "bias"))
    return flax_output(module, layer, x, given, affine)
