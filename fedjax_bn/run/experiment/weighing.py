"""The weighing rule that a configuration names, and what its clients tell it."""

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_bn import aggregation
from fedjax_bn.arguments.choices import call_chosen, naming
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.engine.selection import validation_loss, validation_score
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.run.config.keys import choice_of
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.task import Task

WEIGHING = {
    "by_size": aggregation.by_size,
    "uniform": aggregation.uniform,
    "risk_extrapolation": aggregation.risk_extrapolation,
    "generalization_adjustment": aggregation.generalization_adjustment,
    "by_divergence": aggregation.by_divergence,
}


def choose_weighing(text: str) -> aggregation.WeighingRule:
    """The rule that `name:key=value:key=value` spells, such as `risk_extrapolation:eta=0.3`.

    A user's own, `package.module:function`, is a rule `(sizes, risks, *, ...) -> weights`, or a
    function without required arguments that returns one.

    Raises:
      ValueError: an unknown name or key, or a value of the wrong type or out of its range.
    """
    function, options = choice_of("weigh", text, WEIGHING)
    what = f"config.weigh={brief(text)}"
    if any(p.default is p.empty for p in inspect.signature(function).parameters.values()):
        rule = partial(function, **options) if options else function
    else:
        rule = call_chosen(what, function, **options)
    if not isinstance(rule, aggregation.Weighing):
        _check_weighing(what, rule)
    return rule


def _check_weighing(what: str, rule: aggregation.WeighingRule) -> None:
    """Raises ValueError where a rule does not give two clients two weights."""
    with naming(what):
        weights = jax.eval_shape(rule, jnp.ones(2, jnp.int32), jnp.ones(2))
        if getattr(weights, "shape", None) != (2,):
            raise ConfigError(f"{what} must give a weight f[K] to each of K clients")


def is_told(config: ConfigDict) -> bool:
    """Whether clients measure models on their validation samples for the weighing rule."""
    return config.weigh.partition(":")[0] == "generalization_adjustment"


def follows_rounds(config: ConfigDict) -> bool:
    """Whether the weighing rule takes the number of rounds from the run."""
    if not is_told(config):
        return False
    _, options = choice_of("weigh", config.weigh, WEIGHING)
    return "rounds" not in options


def what_validates(config: ConfigDict) -> str:
    """The key for which clients need their validation samples while they train; "" for none."""
    if config.local_selection:
        return f"config.local_selection={config.local_selection}"
    return f"config.weigh={brief(config.weigh)}" if is_told(config) else ""


def told_weighing(
    config: ConfigDict,
    model: Any,
    prepare: Prepare,
    task: Task,
    statistics: StatisticsRule | None,
) -> aggregation.Weighing:
    """FedDG-GA's rule with what it measures; its `rounds` are the run's unless they are spelled.

    Args:
      config: the run's.
      model, prepare, task: see `selection.validation_loss`.
      statistics: how the method's clients predict.
    """
    make, options = choice_of("weigh", config.weigh, WEIGHING)
    accuracy = options.get("metric") == "accuracy"
    measure = (validation_score if accuracy else validation_loss)(model, prepare, task, statistics)
    return make(measure, **{"rounds": config.rounds} | options)
