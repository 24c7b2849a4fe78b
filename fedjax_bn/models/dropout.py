"""Refuses a model whose dropout is off in training, because nothing can switch it on."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
from flax import nnx

from fedjax_bn.models.nnx_model import NnxModel
from fedjax_bn.normalization.calls import (
    PREDICTING,
    TRAINING,
    Call,
    intercepting,
    mode_arguments,
    name_of,
)

_DROPOUTS = nn.Dropout, nn.MultiHeadDotProductAttention, nnx.Dropout, nnx.MultiHeadAttention


def require_dropout(model: Any, train: bool) -> list[AbstractContextManager]:
    """Returns the contexts in which a training pass refuses dropout that is off.

    The list is empty for a model whose call has an argument of `mode_arguments`, or that has neither
    further arguments nor a field such as `train`: such a model chooses `deterministic` itself.

    Args:
      model: as `forward` takes it, without `FeaturesOf` and `ClassifiedBy`.
      train: whether the pass trains.

    Raises:
      ValueError: while tracing in the context, if a dropout with a rate above 0 is deterministic.
    """
    network = inspect.unwrap(model)
    network = network.net if isinstance(network, NnxModel) else network
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
        rate = getattr(module, "rate", None) or getattr(module, "dropout_rate", 0)
        if deterministic is True and rate > 0:
            raise ValueError(
                f"the dropout {'/'.join(call.path)!r} of {name_of(network)} is off in training, "
                f"because its __call__ has no argument {', '.join(TRAINING)}, "
                f"{' or '.join(PREDICTING)}, by which a method says that it trains: add one and "
                "pass it to the dropout, or set the dropout's rate to 0"
            )
        return function(*args, **kwargs)

    def concerns(call: Call) -> bool:
        return isinstance(call.module, _DROPOUTS) and call.method == "__call__"

    return [intercepting(refuse, concerns, reads_outputs=False)]
