"""Handlers that intercept the calls of a model's layers, the same for linen and for nnx.

A *handler* is a function `handler(function, call, args, kwargs) -> output`. It is called instead of
a module and usually returns `function(*args, **kwargs)`. `intercepting(handler)` installs it for
linen models and for models of `models.from_nnx`; `normalize_with` installs the handler that applies
a statistics rule to all batch norms.

Rules reach our `BatchNorm`, flax's `nn.BatchNorm` and `nnx.BatchNorm`. Flax's batch norms keep
flax's conventions: momentum 0.99 by default, the *biased* variance as running variance, moments in
at least float32. Their `use_running_average` and `use_fast_variance` are ignored: the caller of the
pass decides whether it trains, and `layer.moments` computes the moments.
"""

import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from fedjax_bn.normalization.batch_norm import linen_normalizer
from fedjax_bn.normalization.layer import Layer, Statistics, StatisticsRule, is_spatial
from fedjax_bn.sharing import batch_norm_paths

# Arguments of a model's call that are true if the pass trains, and those that are false then.
TRAINING = ("train", "training", "is_training", "is_train")
PREDICTING = ("deterministic", "use_running_average", "inference")
SERVED = "fedjax_bn.normalization.BatchNorm, flax.linen.BatchNorm or flax.nnx.BatchNorm"
Path = tuple[str, ...]


class Call(NamedTuple):
    """A call of a linen or nnx module."""

    path: Path  # the names that lead to the module, () for the model itself
    method: str  # name of the method, usually `__call__`; in nnx only `__call__` is intercepted
    # f[inputs, outputs] of a dense layer, () during initialization; None for other layers
    kernel: Any
    # `normalize(function, args, kwargs, rule, valid) -> y` for a batch norm that rules reach; None
    # for any other module
    normalize: Callable[..., jax.Array] | None
    module: Any  # the module itself

    @property
    def is_dense(self) -> bool:
        """Whether this is the `__call__` of a dense layer (`nn.Dense`, `nnx.Linear`)."""
        return self.kernel is not None and self.method == "__call__"


_Handler = Callable[[Callable[..., Any], Call, tuple, dict[str, Any]], Any]
_Concerns = Callable[[Call], bool]
_handlers: ContextVar[tuple[tuple[_Handler, _Concerns], ...]] = ContextVar("handlers", default=())
_outputs_read: ContextVar[bool] = ContextVar("outputs_read", default=False)


@contextmanager
def intercepting(
    handler: _Handler, concerns: _Concerns = lambda call: True, *, reads_outputs: bool = True
) -> Iterator[None]:
    """Returns a context in which the handler is called instead of modules.

    It acts while a model is traced, so it works under `jit`, `vmap`, `scan` and `shard_map`.

    Args:
      concerns: whether the handler takes a call; by default it takes all.
      reads_outputs: whether the handler reads or changes outputs of modules. Then a batch norm
        before a pooling is computed before it on accelerators too.
    """
    token = _handlers.set((*_handlers.get(), (handler, concerns)))
    read = _outputs_read.set(_outputs_read.get() or reads_outputs)
    try:
        with _linen_intercepted():
            yield
    finally:
        _handlers.reset(token)
        _outputs_read.reset(read)


def changing_outputs(
    places: Collection[str], change: Callable[[str, Any], Any]
) -> AbstractContextManager[None]:
    """Returns a context in which `change(name, output)` replaces the outputs of modules by path."""

    def changed(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        output, name = function(*args, **kwargs), "/".join(call.path)
        return change(name, output) if call.method == "__call__" and name in places else output

    return intercepting(changed)


_linen = threading.local()  # .intercepted: whether linen calls `_intercept_linen` in this thread


@contextmanager
def _linen_intercepted() -> Iterator[None]:
    """Returns a context in which linen calls modules through the current handlers."""
    if getattr(_linen, "intercepted", False):
        yield
        return
    _linen.intercepted = True
    try:
        with nn.intercept_methods(_intercept_linen):
            yield
    finally:
        # Flax removes interceptors inside an `assert`: under `python -O` this one stays for ever,
        # does nothing without handlers, and must not be installed again.
        _linen.intercepted = not __debug__


def _intercept_linen(function: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    if not _handlers.get():
        return function(*args, **kwargs)
    module = context.module
    dense = isinstance(module, nn.Dense)
    kernel = module.get_variable("params", "kernel", ()) if dense else None
    call = Call(module.path, context.method_name, kernel, linen_normalizer(module), module)
    return through_handlers(function, call)(*args, **kwargs)


def outputs_are_read() -> bool:
    """Returns whether a handler of the current contexts reads or changes outputs of modules."""
    return _outputs_read.get()


def through_handlers(function: Callable, call: Call) -> Callable:
    """Returns a module's function with the current handlers around it, the first one outermost."""

    def inside(handler: _Handler, function: Callable) -> Callable:
        return lambda *args, **kwargs: handler(function, call, args, kwargs)

    # The last first, so that the first context ends up outermost.
    for handler, concerns in reversed(_handlers.get()):
        if concerns(call):
            function = inside(handler, function)
    return function


def normalize_with(
    statistics: StatisticsRule | None = None,
    valid: jax.Array | None = None,
    *,
    owners: frozenset[Path] = frozenset(),
) -> AbstractContextManager:
    """Returns a context in which every batch norm uses a statistics rule and a mask of samples.

        with normalize_with(running_statistics):
            logits = model.apply(variables, images)

    Args:
      statistics: the rule; None for batch statistics in a pass that may move the running ones, and
        for running statistics in any other pass.
      valid: bool[B], the samples that count; None for all.
      owners: paths of the modules with running statistics (`sharing.batch_norm_paths`); while
        tracing, one that the rule cannot reach raises ValueError.
    """

    def concerns(call: Call) -> bool:
        if call.normalize:
            return call.method == "__call__"
        return statistics is not None and call.path in owners

    def hand_over(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        if call.normalize:
            return call.normalize(function, args, kwargs, statistics, valid)
        name = "/".join(call.path) or "at the root"
        remedy = f"use {SERVED}, or fedbn and running"
        raise ValueError(f"no rule reaches the running statistics of {name!r}: {remedy}")

    return intercepting(hand_over, concerns, reads_outputs=False)


def spatial_layers(
    model: Any, variables: dict, images: jax.Array | jax.ShapeDtypeStruct
) -> dict[str, int]:
    """Returns name -> channels C of every batch norm with spatial axes, found by a trace."""
    channels = {}

    def note(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if is_spatial(x):
            channels[layer.name] = x.shape[-1]
        # Any statistics do, because only shapes are traced.
        return Statistics(layer.mean, layer.var)

    with normalize_with(note):
        shapes_of(model, variables, images)
    return channels


def in_forward_order(
    names: Iterable[str], model: Any, variables: dict, images: jax.Array
) -> list[str]:
    """Returns names of modules in the order in which a trace first calls them.

    Names are paths such as "layer1_0/norm1", or "." for the model itself; `jit` and trees of
    variables sort them. Modules that are not called come last.
    """
    order: dict[str, int] = {}

    def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        # A module may be called again: its first call counts.
        order.setdefault("/".join(call.path) or ".", len(order))
        return function(*args, **kwargs)

    with intercepting(note):
        shapes_of(model, variables, images)
    return sorted(names, key=lambda name: order.get(name, len(order)))


def shapes_of(model: Any, variables: dict, images: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """Returns the shapes of a model's outputs in evaluation mode, found by a trace."""

    def outputs(variables: dict, images: jax.Array) -> Any:
        return model.apply(variables, images, **mode_arguments(model.__call__, False))

    return jax.eval_shape(outputs, variables, images)


def mode_arguments(function: Callable[..., Any], train: bool) -> dict[str, bool]:
    """Returns the arguments of a function that say whether a pass trains: {"train": train}."""
    values = dict.fromkeys(TRAINING, train) | dict.fromkeys(PREDICTING, not train)
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in parameters}


def init_variables(model: Any, key: jax.Array, images: jax.Array) -> dict:
    """Returns a model's first collections, of a pass that does not train."""
    return model.init(key, images, **mode_arguments(model.__call__, False))


def require_batch_norm(name: str, variables: dict, remedy: str = "use fedavg") -> dict:
    """Returns the variables, which `name` needs with batch norms; ValueError if they have none."""
    if not batch_norm_paths(variables):
        problem = f"{name} needs batch norms, but the model has none"
        raise ValueError(f"{problem}: build it with BatchNorm, or {remedy}")
    return variables


def network_name(model: Any) -> str:
    """Returns the name of the class of a model without its wrappers, for messages."""
    return type(inspect.unwrap(model)).__name__
