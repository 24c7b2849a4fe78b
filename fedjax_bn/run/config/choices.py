"""Reads keys that are a name with options, before JAX is imported: mistakes are told at once."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedjax_bn.arguments.choices import Argument, Table, read_choice
from fedjax_bn.arguments.errors import ConfigError, as_config_errors
from fedjax_bn.arguments.ranges import Above0, AtLeast0, Inside, Seed, Share
from fedjax_bn.arguments.text import brief, nearest


class _Privacy(NamedTuple):
    """Updates are clipped, and the server adds noise to their sum, or each client to its own.

    Attributes:
      clip: Norm to which an update is clipped, over all shared leaves.
      noise: Deviation of the noise on shared leaves, in units of clip.
      delta: Reported delta: far below 1 over the number of clients.
      seed: Seed of the noise. By default it follows from the run's seed; over Flower it is drawn at
        random and never sent.
    """

    at: str
    clip: Above0
    noise: AtLeast0 = 0.0
    delta: Inside = 1e-5
    seed: Seed | None = None


class _Participation(NamedTuple):
    """Chances to be drawn are equal (uniform), or by the clients' samples (by_size).

    Attributes:
      dropout: Chance that a drawn client drops out of the round.
      trace: File that says which clients are available when (docs/command_line.md).
    """

    draw: str
    dropout: Share = 0.0
    trace: str = ""


class _Optimizer(NamedTuple):
    """Rate, momentum and weight decay have keys of their own.

    Attributes:
      clip: Global norm to which a client's gradient is clipped in each step; by default none.
    """

    clip: Above0 | None = None


# Key, or kind of `fedjax-bn list` -> name -> the type of its options.
CLOSED: dict[str, Table] = {
    "optimizers": dict.fromkeys(("sgd", "adam"), _Optimizer),
    "participation": dict.fromkeys(("uniform", "by_size"), _Participation),
    "privacy": dict.fromkeys(("server", "client"), _Privacy),
}
TASK_NAMES = ("classification", "detection", "segmentation")


def privacy_of(config: ConfigDict) -> _Privacy | None:
    """Returns what the key `privacy`, such as `server:clip=1:noise=1`, says; None if empty."""
    if not config.privacy:
        return None
    at, options = closed_choice("privacy", config.privacy, CLOSED["privacy"], "at")
    return _Privacy(at, **options)


def optimizer_of(config: ConfigDict) -> tuple[str, float | None]:
    """Returns the name and the clip in the key `optimizer.name`, such as `sgd:clip=1`."""
    name, options = closed_choice("optimizer.name", config.optimizer.name, CLOSED["optimizers"])
    return name, options.get("clip")


def participation_of(config: ConfigDict) -> _Participation:
    """Returns what the key `participation`, such as `uniform:dropout=0.1`, says."""
    table = CLOSED["participation"]
    draw, options = closed_choice("participation", config.participation, table, "draw")
    return _Participation(draw, **options)


def closed_choice(key: str, text: str, table: Table, *given: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the options of a choice that cannot be a user's own function."""
    name = text.partition(":")[0]
    choose(table, name, key)
    return name, choice_of(key, text, table, *given)[1]


def choose(table: Mapping[str, Any], name: str, key: str) -> Any:
    """Returns `table[name]`; a ConfigError with the nearest name if there is no such name."""
    if name not in table:
        raise ConfigError(f"config.{key}={brief(name)} is unknown{nearest(name, table)}")
    return table[name]


def choice_of(
    key: str, text: str, table: Table, /, *given: str, **extra: Argument
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns `choices.read_choice` for the value of a key; its errors become ConfigErrors."""
    with as_config_errors():
        return read_choice(f"config.{key}={brief(text)}", text, table, given=given, extra=extra)
