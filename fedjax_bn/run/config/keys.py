"""Configurations: changing keys; types and ranges checked against the table of `defaults`."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from fedjax_bn.engine import spelling
from fedjax_bn.engine.ranges import brief, nearest, refusal
from fedjax_bn.engine.spelling import Table, as_float, literal
from fedjax_bn.run.config.defaults import KEYS, base
from fedjax_bn.run.config.likely_keys import likely_keys
from fedjax_bn.run.errors import ConfigError

__all__ = ["base", "check", "override"]  # what a config file needs

# Keys that are gone, and the value of each that changes nothing.
RETIRED = {"cpu_kernels": "table"}
# What runs did before there was a key for it, where its default is something else.
BEFORE = {"data.orientation": "stored"}


def override(config: ConfigDict, changes: str) -> ConfigDict:
    """Applies `key=value,key=value` (as in `configs/digits.py:rounds=3,data.path=x`) in place.

    A comma that no `key=` follows belongs to the value: `adaptations=running,batch`.

    Raises:
      ConfigError: an unknown key, a value of the wrong type, or a part without '='.
    """
    for change in filter(None, re.split(r",(?=[\w.]+=)", changes.strip(","))):
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"config change {brief(change)} must be of the form key=value")
        assign(config, key, text)
    return config


def assign(config: ConfigDict, key: str, text: str) -> None:
    """Sets a dotted key to the value that `text` spells.

    Raises:
      ConfigError: there is no such key, or the value has another type than the default.
    """
    check_key(key)
    value = parse(text, KEYS[key].kind)
    check_type(key, value)
    with config.unlocked():
        config.update_from_flattened_dict({key: value})


def parse(text: str, kind: type) -> Any:
    """The value that `text` spells for a key of type `kind`; of another type if it spells none.

    Texts need no quotes, and tuples of texts no parentheses: `running,batch`.
    """
    value = literal(text)
    if kind is float and type(value) in (int, float, str):
        try:
            return as_float(value)
        except ValueError:
            return value
    if kind is str:
        return value if isinstance(value, str) else text
    if kind is tuple and isinstance(value, str):
        return tuple(filter(None, map(str.strip, value.split(","))))
    if kind is tuple and isinstance(value, tuple | list):
        return tuple(entry if isinstance(entry, str) else brief(entry) for entry in value)
    return value


def check_type(name: str, value: Any) -> None:
    """Raises ConfigError if a value has another type than the default of its dotted key."""
    key = KEYS[name]
    right = type(value) is key.kind or (value is None and key.optional is not None)
    if key.kind is tuple and right:
        right = all(isinstance(entry, str) for entry in value)
    if not right:
        kind = "a tuple of names" if key.kind is tuple else key.kind.__name__
        such = "" if key.default is None else f", such as its default {brief(key.default)}"
        raise ConfigError(
            f"config.{name}={brief(value)} is of type {type(value).__name__}, but it must be {kind}"
            f"{such}"
        )


def check_complete(config: ConfigDict) -> None:
    """Raises ConfigError if keys of a configuration are not exactly those that there are."""
    names = [name for name, _ in flatten(config)]
    for name in names:
        check_key(name)
    if missing := KEYS.keys() - set(names):
        raise ConfigError(
            f"the configuration lacks {', '.join(sorted(missing))}: get_config must start from "
            "fedjax_bn.run.config.keys.base()"
        )


def check_key(name: str) -> None:
    """Raises ConfigError with the likeliest keys if there is no dotted key of that name."""
    group = [key for key in sorted(KEYS) if key.startswith(f"{name}.")]
    if group:
        raise ConfigError(f"config.{name} is a group of keys: set one of {', '.join(group)}")
    if name not in KEYS:
        likely = ", ".join(map(repr, likely_keys(name)))
        hint = f"did you mean {' or '.join(likely.rsplit(', ', 1))}? " if likely else ""
        raise ConfigError(f"config has no key {brief(name)}; {hint}`fedjax-bn list keys` names all")


def _check_range(name: str, value: Any) -> None:
    """Raises ConfigError if a value of the right type is not in the range of its dotted key."""
    if value is not None and (why := refusal(value, KEYS[name].range)):
        raise ConfigError(f"config.{name}={brief(value)} {why}")


def up_to_date(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that an earlier version recorded, in the form of today's.

    Keys that came later have their defaults, or what was done `BEFORE`; `RETIRED` ones go where
    their value means what is always done now.
    """
    defaults = {name: key.default for name, key in KEYS.items()}
    kept = {name: value for name, value in flat.items() if RETIRED.get(name) != value}
    return defaults | BEFORE | kept


def flatten(config: ConfigDict, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """All (dotted key, value) pairs."""
    for key in sorted(config):
        value = config[key]
        if isinstance(value, ConfigDict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def choose(table: dict[str, Any], name: str, key: str) -> Any:
    """`table[name]`.

    Raises:
      ConfigError: there is no such name; the message lists the valid ones.
    """
    if name not in table:
        raise ConfigError(f"config.{key}={brief(name)} is unknown{nearest(name, table)}")
    return table[name]


def check(config: ConfigDict) -> None:
    """Checks keys, types and ranges of all values that need no data, and what excludes what.

    Raises:
      ConfigError: naming the key, its value and what is allowed.
    """
    check_complete(config)
    for name, value in flatten(config):
        check_type(name, value)
        _check_range(name, value)
    if config.local_steps and config.local_epochs != 1:
        raise ConfigError(
            f"config.local_steps={config.local_steps} and config.local_epochs="
            f"{config.local_epochs} exclude each other: leave local_epochs at 1"
        )
    if config.client_epochs and (config.local_steps or config.local_epochs != 1):
        raise ConfigError(
            f"config.client_epochs={','.join(config.client_epochs)} says how much clients train: "
            "leave local_epochs at 1 and local_steps at 0"
        )
    if config.privacy.noise and not config.privacy.clip:
        raise ConfigError(
            f"config.privacy.noise={config.privacy.noise:g} is in units of privacy.clip: set that "
            "above 0, the norm to which a client's update is clipped"
        )
    if config.start_from and config.pretrained:
        raise ConfigError(
            f"config.start_from={brief(config.start_from)} and config.pretrained="
            f"{brief(config.pretrained)} exclude each other: a run starts from one model"
        )
    _check_optimizer(config.optimizer)
    rounds, warmup = config.rounds, config.optimizer.warmup_rounds
    ends_with_run = config.optimizer.schedule == "cosine" and not config.optimizer.decay_rounds
    if ends_with_run and warmup >= rounds:
        raise ConfigError(
            f"config.optimizer.warmup_rounds={warmup} leaves none of rounds={rounds} to the "
            "cosine: lower it, or set optimizer.decay_rounds"
        )


def _check_optimizer(optimizer: ConfigDict) -> None:
    """Raises ConfigError where keys of the clients' optimizer exclude each other."""
    schedule = optimizer.schedule
    by_factor = schedule in ("step", "exponential")
    if by_factor and not optimizer.decay_rounds:
        raise ConfigError(
            f"config.optimizer.schedule={schedule!r} needs optimizer.decay_rounds above 0, the "
            "rounds after which optimizer.decay_factor has been applied once"
        )
    used = {
        "decay_rounds": schedule != "constant",
        "decay_factor": by_factor,
        "final_fraction": schedule == "cosine",
    }
    for key, is_used in used.items():
        name = f"optimizer.{key}"
        if not is_used and optimizer[key] != KEYS[name].default:
            raise ConfigError(
                f"config.{name}={optimizer[key]} is of no use with optimizer.schedule="
                f"{schedule!r}: leave it out, or choose another schedule"
            )
    if optimizer.nesterov and not optimizer.momentum:
        raise ConfigError("config.optimizer.nesterov=True needs optimizer.momentum above 0")
    if optimizer.name != "sgd" and optimizer.momentum:
        raise ConfigError(
            f"config.optimizer.momentum={optimizer.momentum} is of no use with optimizer.name="
            f"{optimizer.name!r}, which has its own: leave it at 0, or choose sgd"
        )


def choice_of(
    key: str, text: str, table: Table, given: Collection[str] = ()
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """`spelling.read_choice` for the value of a key, with a ConfigError."""
    try:
        return spelling.read_choice(f"config.{key}={brief(text)}", text, table, given=given)
    except ValueError as error:
        raise ConfigError(str(error)) from error
