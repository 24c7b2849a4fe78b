"""How the modules of an nnx model are seen by handlers, and its `nnx.BatchNorm` is served.

nnx has no interceptors. A model that is watched is a fresh copy, made for one pass, whose modules
change their class for one derived from it, in which `__call__` goes through the handlers. Nothing
outside that copy changes.
"""

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, cast

import jax
from flax import nnx

from fedjax_bn.normalization.calls import Call, Path, flax_input, flax_output, through_handlers
from fedjax_bn.normalization.layer import Layer, Statistics, StatisticsRule, statistics_of

_PASS = "fedjax_bn_pass"  # attribute of a watched module: (path, moving, recording)


class Recorded(nnx.Variable):
    """What a rule recorded in a batch norm."""


def watch(net: nnx.Module, *, moving: bool, recording: bool) -> None:
    """Lets handlers stand around every call of the modules of a fresh copy.

    Args:
      net: the copy, which belongs to this pass alone.
      moving: whether the pass may move running statistics.
      recording: whether what rules record is wanted.
    """
    for path, module in list(nnx.iter_graph(net)):
        if isinstance(module, nnx.Module) and callable(module):
            setattr(module, _PASS, (tuple(map(str, path)), moving, recording))
            object.__setattr__(module, "__class__", _watched(type(module)))


@cache
def _watched(kind: type[nnx.Module]) -> type[nnx.Module]:
    @wraps(kind.__call__)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        path, _, _ = getattr(self, _PASS)
        kernel = self.kernel[...] if isinstance(self, nnx.Linear) else None
        served = kind.__call__ is nnx.BatchNorm.__call__
        normalize = partial(_normalize, cast(nnx.BatchNorm, self)) if served else None
        function = partial(kind.__call__, self)
        return through_handlers(function, Call(path, "__call__", kernel, normalize), args, kwargs)

    namespace = {"__call__": call, "__module__": kind.__module__}
    return cast(Any, type(kind))(kind.__name__, (kind,), namespace)


def _normalize(
    module: nnx.BatchNorm,
    function: Callable,
    args: tuple,
    kwargs: dict,
    rule: StatisticsRule | None,
    valid: jax.Array | None,
) -> jax.Array:
    del function
    path, moving, recording = getattr(module, _PASS)
    x = flax_input(module, path, args, kwargs)
    layer = _layer_of(module, path, moving)
    given = statistics_of(rule, layer, x, valid)
    _store(module, given, moving=moving, recording=recording)
    return flax_output(module, layer, x, given, (_value(module.scale), _value(module.bias)))


def _layer_of(module: nnx.BatchNorm, path: Path, moving: bool) -> Layer:
    return Layer(
        path=path,
        mean=module.mean[...],
        var=module.var[...],
        epsilon=module.epsilon,
        momentum=module.momentum,
        training=moving,
        unbiased=False,
        gate=_value(getattr(module, "gate", None)),
    )


def _store(module: nnx.BatchNorm, given: Statistics, *, moving: bool, recording: bool) -> None:
    if given.moved is not None and moving:
        set_value(module.mean, given.moved[0])
        set_value(module.var, given.moved[1])
    if recording:
        for name, value in (given.recorded or {}).items():
            setattr(module, name, Recorded(value))


def set_value(variable: nnx.Variable, value: jax.Array) -> None:
    """Gives a variable another array, of any dtype; flax 0.11 has no `Variable.set_value`."""
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value


def _value(variable: nnx.Variable | None) -> jax.Array | None:
    return None if variable is None else variable[...]
