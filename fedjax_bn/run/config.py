"""Configurations: reading files, changing keys, types checked against `defaults.base`."""

import ast
import difflib
import math
import re
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from fedjax_bn.run.defaults import base
from fedjax_bn.run.errors import ConfigError

EXAMPLE = "configs/quickstart.py"


def read(source: str, changes: Iterable[tuple[str, str]] = ()) -> ConfigDict:
    """Runs a config file and applies changes to what its `get_config` returns.

    Args:
      source: FILE.py, optionally with changes behind a colon, FILE.py:key=value,key=value.
      changes: further (key, value) pairs, from `--config.key=value`.

    Raises:
      ConfigError: the file is missing or fails, or a change has an unknown key or a wrong type.
    """
    path, _, inline = source.partition(":")
    if not Path(path).is_file():
        raise ConfigError(f"there is no config file {path!r}: give one such as {EXAMPLE}")
    try:
        get_config = runpy.run_path(path)["get_config"]
        config = get_config(inline) if inline else get_config()
    except ConfigError:
        raise
    except SyntaxError as error:
        raise ConfigError(f"config file {path}, line {error.lineno}: {error.msg}") from error
    except Exception as error:  # whatever a user's own file may raise
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"config file {path} fails ({type(error).__name__}: {reason}): it must define "
            f"get_config(changes='') that returns a ConfigDict, see {EXAMPLE}"
        ) from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"get_config of {path} returns {type(config).__name__}, but it must return a "
            f"ConfigDict, see {EXAMPLE}"
        )
    for key, text in changes:
        assign(config, key, text)
    return config


def changes_of(arguments: Iterable[str]) -> list[tuple[str, str]]:
    """The (key, value) pairs of arguments `--config.KEY=VALUE` or `--config.KEY VALUE`.

    Raises:
      ConfigError: an argument is neither.
    """
    changes, left = [], iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if not name.startswith(("--config.", "-config.")):
            raise ConfigError(
                f"unknown argument {argument!r}: allowed are --config, --config.KEY=VALUE and "
                "--workdir, see --help"
            )
        value = value if equals else next(left, None)
        if value is None:
            raise ConfigError(f"{name} has no value: write {name}=VALUE")
        changes.append((name.partition(".")[2], value))
    return changes


def override(config: ConfigDict, changes: str) -> ConfigDict:
    """Applies `key=value,key=value` (as in `configs/digits.py:rounds=3,data.path=x`) in place.

    A comma that no `key=` follows belongs to the value: `adaptations=running,batch`.

    Raises:
      ConfigError: an unknown key, a value of the wrong type, or a part without '='.
    """
    for change in filter(None, re.split(r",(?=[\w.]+=)", changes.strip(","))):
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"config change {change!r} must be of the form key=value")
        assign(config, key, text)
    return config


def assign(config: ConfigDict, key: str, text: str) -> None:
    """Sets a dotted key to the value that `text` spells.

    Raises:
      ConfigError: there is no such key, or the value has another type than the default.
    """
    check_key(config, key)
    value = parse(text, kind_of(config, key))
    check_type(key, value)
    with config.unlocked():
        config.update_from_flattened_dict({key: value})


def parse(text: str, kind: type) -> Any:
    """The value that `text` spells for a key of type `kind`; of another type if it spells none.

    Texts need no quotes, and tuples of texts no parentheses: `running,batch`.
    """
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if kind is float:
        try:
            return value if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            return value
    if kind is str:
        return value if isinstance(value, str) else text
    if kind is tuple and isinstance(value, str):
        return tuple(filter(None, map(str.strip, value.split(","))))
    if kind is tuple and isinstance(value, tuple | list):
        return tuple(map(str, value))
    return value


def check_type(key: str, value: Any) -> None:
    """Raises ConfigError if a value has another type than the default of its dotted key."""
    defaults = base()
    default, kind = lookup(defaults, key), kind_of(defaults, key)
    right = type(value) is kind or (value is None and default is None)
    if kind is tuple and right:
        right = all(isinstance(entry, str) for entry in value)
    if not right:
        name = "a tuple of names" if kind is tuple else kind.__name__
        such = "" if default is None else f", such as its default {default!r}"
        raise ConfigError(
            f"config.{key}={value!r} is of type {type(value).__name__}, but it must be {name}{such}"
        )


def check_key(config: ConfigDict, key: str) -> None:
    """Raises ConfigError with the nearest valid key if `config` has no dotted key `key`."""
    keys = dict(flatten(config))
    group = [name for name in keys if name.startswith(f"{key}.")]
    if group:
        raise ConfigError(f"config.{key} is a group of keys: set one of {', '.join(group)}")
    if key not in keys:
        raise ConfigError(f"config has no key {key!r}{nearest(key, keys)}")


def kind_of(config: ConfigDict, key: str) -> type:
    """The type that the values of a dotted key have."""
    group, _, name = key.rpartition(".")
    return (lookup(config, group) if group else config).get_type(name)


def lookup(config: ConfigDict, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = config[part]
    return config


def flatten(config: ConfigDict, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """All (dotted key, value) pairs."""
    for key in sorted(config):
        value = config[key]
        if isinstance(value, ConfigDict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def choose(table: dict[str, Any], name: str, key: str) -> Any:
    """`table[name]`.

    Raises:
      ConfigError: there is no such name; the message lists the valid ones.
    """
    if name not in table:
        raise ConfigError(f"config.{key}={name!r} is unknown{nearest(name, table)}")
    return table[name]


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: the likely meant name, and all valid ones."""
    valid = sorted(valid)
    lower = {option.lower(): option for option in valid}
    close = difflib.get_close_matches(name.lower(), lower, 1, 0.5)
    hint = f"; did you mean {lower[close[0]]!r}?" if close else ";"
    return f"{hint} valid are {', '.join(valid)}"


AT_LEAST_ONE = ("rounds", "local_epochs", "batch_size", "eval_every", "eval_batch_size")
AT_LEAST_ONE += (
    "checkpoint_every",
    "adapt_batch_size",
    "personalize.steps",
    "data.clients_per_domain",
    "data.image_size",
)
AT_LEAST_ZERO = ("local_steps", "local_selection", "fedig.lambda_1", "fedig.lambda_2")
AT_LEAST_ZERO += ("clients_per_round", "seed", "fedprox.mu")
AT_LEAST_ZERO += ("optimizer.momentum", "optimizer.weight_decay", "data.num_clients")
AT_LEAST_ZERO += ("data.device_megabytes", "data.validation", "data.test")


def check(config: ConfigDict) -> None:
    """Checks keys, types and ranges of all values that need no data.

    Raises:
      ConfigError: naming the key, its value and what is allowed.
    """
    defaults = base()
    for key, value in flatten(config):
        check_key(defaults, key)
        check_type(key, value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"config.{key}={value} must be a finite number")
    for keys, least in ((AT_LEAST_ONE, 1), (AT_LEAST_ZERO, 0)):
        for key in keys:
            if not lookup(config, key) >= least:
                raise ConfigError(f"config.{key}={lookup(config, key)} must be at least {least}")
    if config.seed >= 2**32:
        raise ConfigError(f"config.seed={config.seed} must be below 2**32, as JAX's keys need it")
    if not config.optimizer.learning_rate > 0:
        raise ConfigError(
            f"config.optimizer.learning_rate={config.optimizer.learning_rate} must be above 0"
        )
    fraction = config.data.fraction
    if fraction is not None and not 0 < fraction <= 1:
        raise ConfigError(f"config.data.fraction={fraction} must be above 0 and at most 1")
    choose({"stop": None, "drop": None}, config.on_nonfinite, "on_nonfinite")
    partitions = dict.fromkeys(("iid", "dirichlet", "pooled"))
    choose(partitions, config.data.partition, "data.partition")
    if config.local_steps and config.local_epochs != 1:
        raise ConfigError(
            f"config.local_steps={config.local_steps} and config.local_epochs="
            f"{config.local_epochs} exclude each other: leave local_epochs at 1"
        )
    check_client_epochs(config)
    check_optimizer(config)
    for key in ("personalize.samples", "personalize.rate"):
        if lookup(config, key) is not None and lookup(config, key) < 0:
            raise ConfigError(f"config.{key}={lookup(config, key)} must be at least 0")


def check_client_epochs(config: ConfigDict) -> None:
    """Raises ConfigError unless `client_epochs` are whole numbers above 0, and the only choice."""
    given = config.client_epochs
    wrong = [text for text in given if not (text.isdecimal() and int(text) > 0)]
    if wrong:
        raise ConfigError(f"config.client_epochs has {wrong[0]!r}, not a whole number above 0")
    if given and (config.local_steps or config.local_epochs != 1):
        raise ConfigError(
            f"config.client_epochs={','.join(given)} says how much clients train: leave "
            "local_epochs at 1 and local_steps at 0"
        )


def check_optimizer(config: ConfigDict) -> None:
    """Raises ConfigError if keys of the local optimizer contradict each other."""
    optimizer = config.optimizer
    if optimizer.nesterov and not optimizer.momentum:
        raise ConfigError("config.optimizer.nesterov=True needs optimizer.momentum above 0")
    if optimizer.name != "sgd" and optimizer.momentum:
        raise ConfigError(
            f"config.optimizer.momentum={optimizer.momentum} is of no use with optimizer.name="
            f"{optimizer.name!r}, which has its own: leave it at 0, or choose sgd"
        )
