"""The configuration: every key with its default, one meaning everywhere, checked before use."""

import ast
import difflib
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from fedjax_bn.errors import ConfigError


def base() -> ConfigDict:
    """All keys with their defaults; a config file changes what it needs."""
    return ConfigDict(
        {
            "method": "fedbn",  # a name in fedjax_bn.methods
            "baselines": (),  # methods to run beside it, each in WORKDIR/baselines/NAME
            "model": "DigitCNN",  # a name in fedjax_bn.models
            "rounds": 20,
            "local_epochs": 1,  # passes over its own data that a client makes each round
            "local_steps": 0,  # if above 0: steps a client makes each round, instead of epochs
            "batch_size": 32,
            "optimizer": {
                "name": "sgd",  # sgd, adam
                "learning_rate": 0.01,
                "momentum": 0.0,  # sgd only
                "weight_decay": 0.0,  # added to the gradient (L2), as in PyTorch
            },
            "fedprox": {"mu": 0.01},  # strength of the proximal term
            "share": "",  # a name in fedjax_bn.sharing; empty: the method's own rule
            "weigh": "by_size",  # by_size, uniform
            "clients": "auto",  # auto, map, vmap, vmap:n (n clients at a time)
            "clients_per_round": 0,  # clients drawn to take part in a round; 0: all
            "on_nonfinite": "stop",  # stop, drop: what follows an update that is not finite
            "target": "",  # the unseen domain, which trains nobody; empty: none
            "adaptations": ("running",),  # how an unseen client normalizes: running, batch
            "eval_every": 5,  # rounds between evaluations; the last round is always evaluated
            "eval_batch_size": 500,
            "checkpoint_every": 5,  # rounds between checkpoints; the last one is always kept
            "seed": 0,
            "data": {
                "name": "scanners",  # scanners (embedded), digits
                "path": "",  # file or folder of a dataset that is not embedded
                "image_size": 28,  # side of the square images, pixels
                "fraction": placeholder(float),  # of the training data; empty: the source's own
                "clients_per_domain": 1,
            },
        }
    )


def override(config: ConfigDict, changes: str) -> ConfigDict:
    """Applies `key=value,key=value` (as in `configs/digits.py:rounds=3,data.path=x`) in place.

    Raises:
      ConfigError: an unknown key, a value of the wrong type, or a part without '='.
    """
    for change in filter(None, changes.split(",")):
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"config: {change!r} is not of the form key=value")
        check_key(config, key)
        assign(config, key, parse(text))
    return config


def parse(text: str) -> Any:
    """A Python literal where `text` is one, such as 3, 0.1, True or ('a', 'b'); else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def assign(config: ConfigDict, key: str, value: Any) -> None:
    """Sets a dotted key.

    Raises:
      ConfigError: the value has another type than the default.
    """
    old = lookup(config, key)
    if isinstance(old, tuple) and isinstance(value, str):
        value = (value,)
    try:
        with config.unlocked():
            config.update_from_flattened_dict({key: value})
    except TypeError as error:
        raise ConfigError(
            f"config.{key}={value!r} has type {type(value).__name__}, but it must be "
            f"{type(old).__name__}, such as its default {old!r}"
        ) from error


def check_key(config: ConfigDict, key: str) -> None:
    """Raises ConfigError with the nearest valid key if `config` has no dotted key `key`."""
    keys = dict(flatten(config))
    if key not in keys:
        raise ConfigError(f"config has no key {key!r}{nearest(key, keys)}")


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
AT_LEAST_ONE += ("checkpoint_every", "data.clients_per_domain", "data.image_size")
AT_LEAST_ZERO = ("local_steps", "clients_per_round", "seed", "fedprox.mu")
AT_LEAST_ZERO += ("optimizer.momentum", "optimizer.weight_decay")


def check(config: ConfigDict) -> None:
    """Checks types and ranges of all values that need no data.

    Raises:
      ConfigError: naming the key, its value and what is allowed.
    """
    for key, default in flatten(base()):
        value = lookup(config, key)
        if default is not None and not isinstance(value, type(default)):
            raise ConfigError(
                f"config.{key}={value!r} has type {type(value).__name__}, but it must be "
                f"{type(default).__name__}, such as its default {default!r}"
            )
    for keys, least in ((AT_LEAST_ONE, 1), (AT_LEAST_ZERO, 0)):
        for key in keys:
            if not lookup(config, key) >= least:
                raise ConfigError(f"config.{key}={lookup(config, key)} must be at least {least}")
    if not config.optimizer.learning_rate > 0:
        raise ConfigError(
            f"config.optimizer.learning_rate={config.optimizer.learning_rate} must be above 0"
        )
    fraction = config.data.fraction
    if fraction is not None and not 0 < fraction <= 1:
        raise ConfigError(f"config.data.fraction={fraction} must be above 0 and at most 1")
    choose({"stop": None, "drop": None}, config.on_nonfinite, "on_nonfinite")
    if config.local_steps and config.local_epochs != 1:
        raise ConfigError(
            f"config.local_steps={config.local_steps} and config.local_epochs="
            f"{config.local_epochs} exclude each other: leave local_epochs at 1"
        )
