"""Refuses a model whose dropout is off in training, because nothing can switch it on."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn

from fedjax_bn.normalization.calls import (
    PREDICTING,
    TRAINING,
    Call,
    intercepting,
    mode_arguments,
    name_of,
)


def require_dropout(model: Any, train: bool) -> list[AbstractContextManager]:
    """Returns the contexts in which a training pass refuses dropout that is off.

    The list is empty for a model whose call has an argument of `mode_arguments`, or that has
    neither further arguments nor a field such as `train`: that model decides itself.

    Args:
      model: as `forward` takes it, without `FeaturesOf` and `ClassifiedBy`.
      train: whether the pass trains.

    Raises:
      ValueError: while tracing in the context, if a dropout with a rate above 0 is deterministic.
    """
    network = inspect.unwrap(model)
    if not isinstance(network, nn.Module):
        network = getattr(network, "net", network)  # of `from_nnx`; nnx takes long to import
    methods = [getattr(network, name, None) for name in ("__call__", "features", "classify")]
    if not train or any(mode_arguments(method, train) for method in methods if callable(method)):
        return []
    arguments = set(inspect.signature(network).parameters) - {"rngs"}
    fields = (getattr(network, name, None) for name in (*TRAINING, *PREDICTING))
    if len(arguments) == 1 and not any(isinstance(field, bool) for field in fields):
        return []

    def refuse(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        module = call.module
        arguments = inspect.signature(module).bind_partial(*args, **kwargs).arguments
        deterministic = arguments.get("deterministic")
        if deterministic is None:
            deterministic = module.deterministic
        if deterministic is True and (_rate(module) or 0) > 0:
            raise ValueError(
                f"the dropout {'/'.join(call.path)!r} of {name_of(network)} is off in training, "
                f"because its __call__ has no argument {', '.join(TRAINING)}, "
                f"{' or '.join(PREDICTING)}, by which a method says that it trains: add one and "
                "pass it to the dropout, or set the dropout's rate to 0"
            )
        return function(*args, **kwargs)

    def concerns(call: Call) -> bool:
        return call.method == "__call__" and _rate(call.module) is not None

    return [intercepting(refuse, concerns, reads_outputs=False)]


def _rate(module: Any) -> float | None:
    """Returns the rate of flax's dropout or of the dropout in its attention; None for others."""
    if not hasattr(module, "deterministic"):
        return None
    return getattr(module, "rate", getattr(module, "dropout_rate", None))
