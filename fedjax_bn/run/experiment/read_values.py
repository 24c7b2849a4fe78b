"""Reads a configuration's values into the fields of `training.experiment.Experiment`."""

from functools import partial
from typing import Any

from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import as_config_errors
from fedjax_bn.engine.privacy import epsilon
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.run.config.keys import flatten
from fedjax_bn.run.experiment.method import follows_rounds, local_epochs, what_validates
from fedjax_bn.training.availability import kept_on_host
from fedjax_bn.training.experiment import (
    Evaluation,
    LocalWork,
    Participation,
    Plan,
    personalization_of,
)
from fedjax_bn.training.workdir import Record


def choose_participation(config: ConfigDict, num_clients: int) -> Participation:
    """Returns who takes part by `clients_per_round`, `participation` and `population`.

    It does not read the trace; `read_trace` does.
    """
    keys, drawn = config.participation, config.clients_per_round
    host = kept_on_host(config.population, drawn, num_clients)
    return Participation(drawn, keys.draw, keys.dropout, None, host)


def read_values(config: ConfigDict, method: FederatedMethod, num_clients: int) -> dict[str, Any]:
    """Returns the fields of `Experiment` that come straight from the configuration, by name."""
    flat = dict(flatten(config))
    plan = Plan(
        **{name: flat[name] for name in Plan._fields if name in flat},
        device_megabytes=config.data.device_megabytes,
        keys=flat,
        follows=follows_rounds(config),
        privacy=partial(describe_privacy, config, num_clients),
    )
    return {
        "participation": choose_participation(config, num_clients),
        "work": LocalWork(config.batch_size, config.local_steps, local_epochs(config)),
        "plan": plan,
        "evaluation": read_evaluation(config, method),
        "validates": what_validates(config),
    }


def read_evaluation(config: ConfigDict, method: FederatedMethod) -> Evaluation:
    """Returns how clients are tested; an empty `personalize_samples` takes the method's samples."""
    adapts = personalization_of(method, config.seed, config.personalize_samples)
    return Evaluation(
        batch_size=config.eval_batch_size,
        device_megabytes=config.data.device_megabytes,
        clients=config.eval_clients,
        seed=config.seed,
        eval_unseen=config.eval_unseen,
        eval_train_loss=config.eval_train_loss,
        validate_with=config.validate_with,
        personalization=adapts,
    )


def describe_privacy(config: ConfigDict, clients: int, rounds: int) -> Record:
    """Returns {"privacy": ...} for config.json and summary.json; {} if nothing is clipped.

    Without noise epsilon is unbounded, and its entry is null.

    Raises:
      ConfigError: there is noise, but dp-accounting is not installed.
    """
    keys = config.privacy
    if not keys.clip:
        return {}
    # Sampling hides a client only if the cohort is drawn at random and the server does not know it.
    drawn, participation = config.clients_per_round, config.participation
    hides = (
        participation.draw == "uniform"
        and not participation.trace
        and not participation.dropout
        and keys.at == "server"
    )
    cohort = (drawn, clients) if 0 < drawn < clients and hides else ()
    with as_config_errors():
        spent = epsilon(keys.noise, rounds, keys.delta, cohort) if keys.noise else None
    return {
        "privacy": {
            "clip": keys.clip,
            "noise": keys.noise,
            "at": keys.at,
            "epsilon": spent,
            "delta": keys.delta,
            "rounds": rounds,
            "neighbours": "a client's data replaced" if cohort else "with or without a client",
        }
    }
