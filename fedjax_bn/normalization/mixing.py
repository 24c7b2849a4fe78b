"""From the text of a configuration to the rule of FedIG's second pass."""

from collections.abc import Callable
from functools import partial

import jax

from fedjax_bn.normalization.layer import StatisticsRule
from fedjax_bn.normalization.mixig import constant, mixed_statistics, uniform
from fedjax_bn.normalization.mixstyle import mixstyle_statistics
from fedjax_bn.spelling import spelled_change

# mixing(key) -> the rule of one pass
Mixing = Callable[[jax.Array], StatisticsRule]

ARGUMENTS = {
    "uniform": {"low": 0.0, "high": 1.0},
    "constant": {"u": 0.5},
    "mixstyle": {"concentration": 0.1, "probability": 0.5},
}


def choose_mixing(text: str) -> Mixing:
    """Builds what `uniform:low=0:high=0.5`, `constant:u=1` or `mixstyle` spells.

    `uniform` and `constant` are MixIG with u ~ U(low, high) and with one u (FedIG, Tables 1 and 6),
    `mixstyle` is MixStyle in its place (Table 3b).

    Raises:
      ValueError: an unknown name or key, or a value of the wrong type; it lists the valid ones.
    """
    name, *changes = text.split(":")
    if name not in ARGUMENTS:
        raise ValueError(f"mixing {text!r} is unknown; valid are {', '.join(ARGUMENTS)}")
    defaults = ARGUMENTS[name]
    options = dict(spelled_change(f"mixing {text!r}", change, defaults) for change in changes)
    if name == "mixstyle":
        return partial(mixstyle_statistics, **options)
    draw = (uniform if name == "uniform" else constant)(**(defaults | options))
    return partial(mixed_statistics, draw=draw)
