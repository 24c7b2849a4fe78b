"""The clients' optimizer that a configuration names, with its learning rate over rounds."""

from collections.abc import Callable
from typing import Any

import optax
from ml_collections import ConfigDict

from fedjax_bn.local_optimizer import by_round
from fedjax_bn.run.config.keys import choose

OPTIMIZERS: dict[str, Callable[[ConfigDict, Any], optax.GradientTransformation]] = {
    "sgd": lambda keys, rate: optax.sgd(rate, keys.momentum or None, nesterov=keys.nesterov),
    "adam": lambda keys, rate: optax.adam(rate),
}
# Of the keys and of the rounds over which a rate falls by default.
_SCHEDULES: dict[str, Callable[[ConfigDict, int], optax.Schedule]] = {
    "constant": lambda keys, rounds: optax.constant_schedule(keys.learning_rate),
    "cosine": lambda keys, rounds: optax.cosine_decay_schedule(
        keys.learning_rate, keys.decay_rounds or rounds, keys.final_fraction
    ),
    "step": lambda keys, rounds: optax.exponential_decay(
        keys.learning_rate, keys.decay_rounds, keys.decay_factor, staircase=True
    ),
    "exponential": lambda keys, rounds: optax.exponential_decay(
        keys.learning_rate, keys.decay_rounds, keys.decay_factor
    ),
}


def local_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Returns the configured optimizer; by round where `optimizer.schedule` or warm-up say so.

    Raises:
      ConfigError: an unknown name.
    """
    keys = config.optimizer
    make = choose(OPTIMIZERS, keys.name, "optimizer.name")
    if keys.schedule == "constant" and not keys.warmup_rounds:
        optimizer = make(keys, keys.learning_rate)
    else:
        rate = learning_rates(config)
        optimizer = by_round(lambda round: make(keys, rate(round)))
    if keys.weight_decay:
        optimizer = optax.chain(optax.add_decayed_weights(keys.weight_decay), optimizer)
    return optimizer


def learning_rates(config: ConfigDict) -> optax.Schedule:
    """Returns the configured learning rate as a function of the round, from 0.

    In W rounds of warm-up it is (round + 1) / (W + 1) of the full rate; the first round after it
    has the full rate, and the schedule begins. A cosine without `decay_rounds` ends with the run.

    Raises:
      ConfigError: an unknown schedule.
    """
    keys = config.optimizer
    warmup, full = keys.warmup_rounds, keys.learning_rate
    make = choose(_SCHEDULES, keys.schedule, "optimizer.schedule")
    after = make(keys, max(config.rounds - warmup, 1))
    if not warmup:
        return after
    rise = optax.linear_schedule(full / (warmup + 1), full, warmup)
    return optax.join_schedules([rise, after], [warmup])


def ends_with_run(config: ConfigDict) -> bool:
    """Whether the rate of a round depends on how many rounds the run has."""
    return config.optimizer.schedule == "cosine" and not config.optimizer.decay_rounds
