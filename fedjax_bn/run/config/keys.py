"""Changes and checks a configuration by the table of keys in `defaults`."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from fedjax_bn.arguments.choices import Table, misfit, parsed, read_choice
from fedjax_bn.arguments.errors import ConfigError, as_config_errors
from fedjax_bn.arguments.text import brief, nearest, short
from fedjax_bn.run.config.defaults import base, keys

__all__ = ["base", "check", "override"]  # what a config file needs

# Values as earlier versions wrote them, in commands and in config.json of finished runs:
# (key, pattern of the whole value, today's keys and values).
_OLD = (
    ("cpu_kernels", "table", {}),
    ("mesh", "auto", {"mesh.clients": "0", "mesh.batch": "0"}),
    ("mesh", r"(\d+)", {"mesh.clients": r"\1", "mesh.batch": "0"}),
    ("mesh", r"clients:(\d+)", {"mesh.clients": r"\1", "mesh.batch": "1"}),
    ("mesh", r"clients:(\d+),batch:(\d+)", {"mesh.clients": r"\1", "mesh.batch": r"\2"}),
    ("clients", r"vmap:(\d+)", {"clients": r"vmap:at_once=\1"}),
    ("data.partition", r"drawn:(\d+)", {"data.partition": r"drawn:samples=\1"}),
)
# What runs did before these keys existed, where today's default differs.
_BEFORE = {"data.orientation": "stored"}
_MOST = 3  # keys in a suggestion
# Names that other programs and papers use for a key or its last part, in lower case and without
# underscores.
_SYNONYMS = {
    "optimizer.learning_rate": "lr stepsize clientlr locallr baselr initlr",
    "optimizer.weight_decay": "wd decay l2 weightdecay",
    "optimizer.momentum": "mom",
    "optimizer.name": "opt optim optimiser solver adam",
    "optimizer.schedule": "scheduler lrscheduler lrschedule learningrateschedule lrdecay cosine",
    "optimizer.warmup_rounds": "warmup warmupepochs warmupsteps",
    "optimizer.decay_rounds": "tmax decaysteps milestones lrstep",
    "optimizer.decay_factor": "gamma lrgamma lrdecay",
    "optimizer.final_fraction": "minlr etamin lrmin alphamin",
    "rounds": "nrounds numrounds commrounds communicationrounds commround "
    "globalrounds globalepochs maxrounds iterations steps",
    "local_epochs": "e epoch epochs nepochs numepochs localep localepoch le innerepochs maxepochs",
    "local_steps": "steps localiterations inneriterations",
    "batch_size": "bs batch batchsize localbs localbatchsize minibatch trainbatchsize",
    "eval_batch_size": "testbs testbatchsize evalbs",
    "data.num_clients": "k nclients numclients numusers nusers users nodes sites",
    "clients_per_round": "c frac participation participationrate samplerate clientfraction "
    "numclients cohort",
    "participation.dropout": "dropout stragglers",
    "method": "algorithm algo strategy aggregator fl",
    "weigh": "weights weighting aggregation",
    "model": "arch architecture net network backbone",
    "pretrained": "checkpoint init weights",
    "start_from": "resume resumefrom initfrom load loadmodel finetune checkpoint",
    "data.name": "dataset data task",
    "data.path": "root dataroot datadir datapath dir folder",
    "data.image_size": "imgsize imsize resolution size inputsize",
    "data.validation": "val valsplit valfraction",
    "data.orientation": "exif rotation",
    "data.augment": "aug augmentation transform transforms",
    "data.partition": "noniid dirichlet heterogeneity",
    "data.alpha": "dirichlet dirichletalpha concentration",
    "target": "unseen leaveout testdomain heldout targetdomain",
    "eval_every": "evalfreq evalinterval testevery testinterval valinterval",
    "checkpoint_every": "saveevery savefreq saveinterval",
    "patience": "earlystopping earlystop",
    "seed": "randomseed rng manualseed",
    "compute_dtype": "dtype precision amp fp16 bf16 mixedprecision",
    "mesh.clients": "device devices gpu gpus cuda ngpus numgpus",
    "privacy.noise": "dp epsilon sigma noisemultiplier",
    "privacy.clip": "clipping maxgradnorm clipnorm maxnorm gradclip",
    "privacy.delta": "delta",
    "eta": "serverlr",
    "mu": "proximal prox",
}


def override(config: ConfigDict, changes: str) -> ConfigDict:
    """Applies `key=value,key=value` (as in `configs/digits.py:rounds=3,data.path=x`) in place.

    A comma belongs to the value unless a `key=` follows it: `adaptations=running,batch`.

    Raises:
      ConfigError: a key is unknown, a value has the wrong type or is out of its range, or a part
        has no '='.
    """
    # A comma ends a value only before the next "key=".
    for change in filter(None, re.split(r",(?=[\w.]+=)", changes.strip(","))):
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"config change {brief(change)} must be of the form key=value")
        assign(config, key, text)
    return config


def assign(config: ConfigDict, key: str, text: str) -> None:
    """Sets a dotted key to the value of a text; forms of version 0.2.0 are accepted too.

    Raises:
      ConfigError: the key is unknown, or the value has the wrong type or is out of its range.
    """
    renewed = _renewed(key, text)
    for name, new in {key: text}.items() if renewed is None else renewed.items():
        check_key(name)
        value = parsed(new, keys()[name].kind)
        _check_value(name, value)  # before ml_collections, whose message has no range
        with config.unlocked():
            config.update_from_flattened_dict({name: value})


def _renewed(key: str, value: Any) -> dict[str, str] | None:
    """Returns today's keys and texts for a value in a form of 0.2.0; None for other values."""
    for old, pattern, new in _OLD:
        found = re.fullmatch(pattern, value) if key == old and isinstance(value, str) else None
        if found:
            return {name: found.expand(text) for name, text in new.items()}
    return None


def up_to_date(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all keys and values of a configuration from an earlier version, in today's form.

    Keys that came later have their default, or the value in `_BEFORE`.
    """
    found = {name: key.default for name, key in keys().items()} | _BEFORE
    for name, value in flat.items():
        new = _renewed(name, value)
        if new is None and isinstance(value, str) and name in keys():
            # Some tuples were once written as a text.
            new = {name: value} if keys()[name].kind is tuple else None
        if new is None:
            found[name] = value
        else:
            found |= {key: parsed(text, keys()[key].kind) for key, text in new.items()}
    return found


def check(config: ConfigDict) -> None:
    """Checks all that needs no data: keys, types, ranges, and which values exclude each other.

    Raises:
      ConfigError: a check fails; the message has the key, its value and what is allowed.
    """
    check_complete(config)
    for name, value in flatten(config):
        _check_value(name, value)
    if config.local_steps and config.local_epochs != 1:
        raise ConfigError(
            f"config.local_steps={config.local_steps} and config.local_epochs="
            f"{config.local_epochs} exclude each other: leave local_epochs at 1"
        )
    if config.client_epochs and (config.local_steps or config.local_epochs != 1):
        raise ConfigError(
            f"config.client_epochs={brief(config.client_epochs)} sets how much clients train: "
            "leave local_epochs at 1 and local_steps at 0"
        )
    if config.privacy.noise and not config.privacy.clip:
        raise ConfigError(
            f"config.privacy.noise={config.privacy.noise:g} is in units of privacy.clip: set that "
            "above 0, the norm to which a client's update is clipped"
        )
    if config.profile > config.rounds:
        raise ConfigError(
            f"config.profile={config.profile} is above config.rounds={config.rounds}: choose a "
            f"round from 1 to {config.rounds}, or 0 for no profile"
        )
    if config.start_from and config.pretrained:
        raise ConfigError(
            f"config.start_from={brief(config.start_from)} and config.pretrained="
            f"{brief(config.pretrained)} exclude each other: a run starts from one model"
        )
    _check_optimizer(config.optimizer, config.rounds)


def check_complete(config: ConfigDict) -> None:
    """Raises ConfigError unless a configuration has all keys and no others."""
    names = [name for name, _ in flatten(config)]
    for name in names:
        check_key(name)
    if missing := keys().keys() - set(names):
        raise ConfigError(
            f"the configuration lacks {short(', '.join(sorted(missing)))}: get_config must start "
            "from fedjax_bn.run.config.keys.base()"
        )


def check_key(name: str) -> None:
    """Raises ConfigError with the likeliest keys if there is no dotted key of that name."""
    if name in keys():
        return
    if group := [key for key in sorted(keys()) if key.startswith(f"{name}.")]:
        raise ConfigError(f"config.{name} is a group of keys: set one of {', '.join(group)}")
    likely = ", ".join(map(repr, _likely_keys(name)))
    hint = f"did you mean {' or '.join(likely.rsplit(', ', 1))}? " if likely else ""
    raise ConfigError(f"config has no key {brief(name)}; {hint}`fedjax-bn list keys` names all")


def _likely_keys(name: str) -> list[str]:
    """Returns the keys that a name probably means, the likeliest first, at most three.

    A name may be the last part of a key (`mu`), another word for it (`optimizer.lr`), a misspelt
    key (`data.nmae`), or share words with it (`num_local_epochs`).
    """
    known = keys()
    last = re.sub("[-_]", "", name.lower()).rpartition(".")[2]
    same = [key for key in known if key.replace("_", "").rpartition(".")[2] == last]
    same.sort(key=lambda key: key.count("."))
    meant = [key for key, words in _SYNONYMS.items() if last in words.split()]
    named = [key for one in meant for key in known if key == one or key.endswith(f".{one}")]
    close = difflib.get_close_matches(name.lower()[:100], known, _MOST, 0.75)
    words = set(name.lower().replace(".", "_").split("_"))
    shared = {key: len(words & set(key.replace(".", "_").split("_"))) for key in known}
    sharing = sorted(filter(shared.get, known), key=lambda key: (-shared[key], len(key)))
    likely = [*named, *same] or close or sharing
    likely = likely or difflib.get_close_matches(name.lower()[:100], known, _MOST, 0.65)
    return list(dict.fromkeys(likely))[:_MOST]


def _check_value(name: str, value: Any) -> None:
    """Raises ConfigError if a value has the wrong type for its key, or is out of its range."""
    if why := misfit(value, keys()[name]):
        raise ConfigError(f"config.{name}={brief(value)} {why}")


def _check_optimizer(optimizer: ConfigDict, rounds: int) -> None:
    """Raises ConfigError if keys of the clients' optimizer exclude each other."""
    schedule, warmup = optimizer.schedule, optimizer.warmup_rounds
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
        if not is_used and optimizer[key] != keys()[name].default:
            raise ConfigError(
                f"config.{name}={optimizer[key]} has no effect with optimizer.schedule="
                f"{schedule!r}: leave it out, or choose another schedule"
            )
    if optimizer.nesterov and not optimizer.momentum:
        raise ConfigError("config.optimizer.nesterov=True needs optimizer.momentum above 0")
    if optimizer.name != "sgd" and optimizer.momentum:
        raise ConfigError(
            f"config.optimizer.momentum={optimizer.momentum} has no effect with optimizer.name="
            f"{optimizer.name!r}, which has its own: leave it at 0, or choose sgd"
        )
    if schedule == "cosine" and not optimizer.decay_rounds and warmup >= rounds:
        raise ConfigError(
            f"config.optimizer.warmup_rounds={warmup} leaves none of rounds={rounds} to the "
            "cosine: lower it, or set optimizer.decay_rounds"
        )


def flatten(config: ConfigDict, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yields all (dotted key, value) pairs, in the order of their keys."""
    for key in sorted(config):
        value = config[key]
        if isinstance(value, ConfigDict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def choose(table: Mapping[str, Any], name: str, key: str) -> Any:
    """Returns `table[name]`.

    Raises:
      ConfigError: there is no such name; the message suggests the nearest one.
    """
    if name not in table:
        raise ConfigError(f"config.{key}={brief(name)} is unknown{nearest(name, table)}")
    return table[name]


def choice_of(
    key: str, text: str, table: Table, given: Collection[str] = ()
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns `choices.read_choice` for the value of a key; its errors become ConfigErrors."""
    with as_config_errors():
        return read_choice(f"config.{key}={brief(text)}", text, table, given=given)
