"""Configuration: with what a config file starts, and how its keys are changed and checked."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from fedjax_bn.arguments.choices import Argument, parsed
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import brief
from fedjax_bn.run.config.choices import TASK_NAMES, choose, participation_of, privacy_of
from fedjax_bn.run.config.defaults import KEYS, base

__all__ = ["base", "check", "choose", "override"]  # what a config file needs


def override(config: ConfigDict, changes: str) -> ConfigDict:
    """Applies `key=value,key=value` (as in `configs/digits.py:rounds=3,data.path=x`) in place.

    An unknown key, and a value of a wrong type or range, are ConfigErrors.
    """
    # A comma belongs to the value, as in adaptations=running,batch, unless a "key=" follows it.
    for change in filter(None, re.split(r",(?=[\w.]+=)", changes.strip(","))):
        key, equals, value_text = change.partition("=")
        if not equals:
            raise ConfigError(f"config change {brief(change)} must be of the form key=value")
        assign(config, key, value_text)
    return config


def assign(config: ConfigDict, key: str, text: str) -> None:
    """Sets a dotted key to the value of a text; raises ConfigError as `override`."""
    value = parsed(text, _argument(key).kind)
    _check_value(key, value)  # before ml_collections, whose message has no range
    with config.unlocked():
        config.update_from_flattened_dict({key: value})


def check(config: ConfigDict) -> None:
    """Checks all that needs no data: keys, types and ranges; a fault is a ConfigError."""
    values = dict(flatten(config))
    for name, value in values.items():
        _check_value(name, value)
    if missing := ", ".join(sorted(KEYS.keys() - values.keys())):
        raise ConfigError(f"get_config must start from run.config.base(): it lacks {missing}")
    privacy_of(config)
    participation_of(config)
    if config.task:
        choose(dict.fromkeys(TASK_NAMES), config.task.partition(":")[0], "task")


def _argument(name: str) -> Argument:
    """Returns the key of a dotted name; a ConfigError with the nearest keys if there is none."""
    if name in KEYS:
        return KEYS[name]
    # A name may be a group of keys, or a key without its group: `momentum`.
    likely = [key for key in sorted(KEYS) if key.startswith(f"{name}.")]
    likely += [key for key in KEYS if key.rpartition(".")[2] == name.rpartition(".")[2]]
    likely = likely or difflib.get_close_matches(name, KEYS)
    hint = f"did you mean {' or '.join(map(repr, dict.fromkeys(likely)))}? " if likely else ""
    raise ConfigError(f"config has no key {brief(name)}; {hint}`fedjax-bn list keys` names all")


def _check_value(name: str, value: Any) -> None:
    if problem := _argument(name).refusal(value):
        raise ConfigError(f"config.{name}={brief(value)} {problem}")


def flatten(config: ConfigDict, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yields all (dotted key, value) pairs, in the order of their keys."""
    for key in sorted(config):
        value = config[key]
        if isinstance(value, ConfigDict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
