"""From the text of a configuration to the rule of FedIG's second pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from fedjax_bn.arguments.choices import read_choice
from fedjax_bn.arguments.text import brief
from fedjax_bn.normalization.layer import StatisticsRule
from fedjax_bn.normalization.mixig import constant, mixed_statistics, uniform
from fedjax_bn.normalization.mixstyle import mixstyle_statistics

# mixing(key) -> the rule of one pass
Mixing = Callable[[jax.Array], StatisticsRule]

_DRAWS: dict[str, Callable[..., Any]] = {"uniform": uniform, "constant": constant}
_MIXING = _DRAWS | {"mixstyle": mixstyle_statistics}


def choose_mixing(text: str) -> Mixing:
    """Builds what `uniform:low=0:high=0.5`, `constant:u=1` or `mixstyle` spells.

    `uniform` and `constant` are MixIG with u ~ U(low, high) and with one u (FedIG, Tables 1 and 6),
    `mixstyle` is MixStyle in its place (Table 3b), `package.module:function` is a function
    `(key, *, ...) -> StatisticsRule` of one's own.

    Raises:
      ValueError: an unknown name or key, or a value of the wrong type; it lists the valid ones.
    """
    make, options = read_choice(f"mixing {brief(text)}", text, _MIXING)
    if make in _DRAWS.values():
        return partial(mixed_statistics, draw=make(**options))
    return partial(make, **options)
