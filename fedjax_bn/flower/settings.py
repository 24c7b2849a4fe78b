"""Reads the settings of a federation: the run config of the app, and the node config of a client.

The run config is the table `[tool.flwr.app.config]` of the app's pyproject.toml, the node config
the argument of `flower-supernode --node-config`. Their keys have - for _ of `Run` and `Node`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import brief, names_in, nearest
from fedjax_bn.run.config.choices import privacy_of
from fedjax_bn.run.config.file import read

_REPORTS = ("sizes", "losses", "accuracies")
_OF_FLOWER = {"partition-id", "num-partitions"}  # keys that Flower's simulation adds
_NO_ROUNDS = re.compile(r"(?:^|,)\s*rounds=0+\s*(?=,|$)")
_FINGERPRINT = re.compile("SHA256:[A-Za-z0-9+/]{43}")
_Settings = TypeVar("_Settings", bound=NamedTuple)


class Run(NamedTuple):
    """The run config."""

    config: str = ""  # a file in the app's folder or elsewhere, or the name of a packaged config
    changes: str = ""  # of the config's keys, `key=value,key=value`
    clients: int = 0  # K, the number of all clients, which are numbered from 0
    minimum: int = 0  # good uploads that a round needs; 0 for every client that is asked
    workdir: str = "runs/flower"  # the server's folder
    time_limit: float = 600.0  # seconds for which a round waits for its clients
    attempts: int = 3  # how often a round is tried before the server gives up
    size_bound: int = 1_000_000  # the largest number of samples that a client may report
    # to which keys of SuperNodes the clients' numbers are bound: "first" for the key that presents
    # itself first, "any" for none, or fingerprints of `ssh-keygen -lf`, separated by commas
    client_keys: str = "first"
    norm_bound: float = 1e6  # of a client's update, of its message, and of its personal leaves
    serve_unseen: bool = False  # whether clients send personal leaves too, for unseen clients

    def only_evaluates(self) -> bool:
        """Returns whether `changes` has rounds=0: clients score the present model, and no more."""
        return bool(_NO_ROUNDS.search(self.changes))

    def listed_keys(self) -> dict[int, str]:
        """Returns client -> fingerprint, from the list in `client_keys`; {} for first and any."""
        listed = () if self.client_keys in ("first", "any") else names_in(self.client_keys)
        return dict(enumerate(listed))


class Node(NamedTuple):
    """The node config of a client."""

    client: int = -1  # the client's number, from 0
    folder: str = ""  # the folder for its personal leaves and the memory of its method
    data: str = ""  # its own samples; empty: those of this number in the config's data
    domain: str = ""  # its domain, if its own data hold several
    name: str = ""  # its name in the server's records; empty: client-NUMBER
    # what it reports: any of sizes, losses and accuracies, separated by commas, or "nothing"
    report: str = ",".join(_REPORTS)
    serve_unseen: bool = False  # whether it sends its personal leaves if the run config asks
    # whether evaluations write FOLDER/FEDERATION/predictions.csv, a line for each tested sample
    predictions: bool = False
    # after how many local steps it stores its training, so that it goes on there in the same round
    # if it dies; 0 to begin the round again
    checkpoint_steps: int = 0

    def reports(self, kind: str) -> bool:
        """Returns whether the client reports `kind`: "sizes", "losses" or "accuracies"."""
        return kind in self.report.split(",")


def run_of(entries: Mapping[str, Any]) -> Run:
    """Returns the run config from Flower's keys (with - for _); other keys have their defaults.

    Raises ConfigError if a key is unknown, or its value is of the wrong type or out of its range.
    """
    run = _read("run config", entries, Run())
    keys = [*run.listed_keys().values()]
    listed = len({*keys}) == len(keys) == run.clients and all(map(_FINGERPRINT.fullmatch, keys))
    bound_to = run.client_keys in ("first", "any") or listed
    allowed = {
        "config": (run.config, "a file, or the name of a packaged config"),
        "clients": (run.clients >= 1, "at least 1"),
        "minimum": (0 <= run.minimum <= run.clients, f"from 0 to clients={run.clients}"),
        "time-limit": (run.time_limit > 0, "above 0"),
        "attempts": (run.attempts >= 1, "at least 1"),
        # Sizes are added in 32 bits.
        "size-bound": (0 < run.size_bound * run.clients < 2**31, "1 to 2^31 / clients"),
        "client-keys": (bound_to, "first, any, or a different SHA256:... for each client"),
        "norm-bound": (run.norm_bound > 0, "above 0"),
    }
    _check("run config", run, allowed)
    return run


def node_of(entries: Mapping[str, Any]) -> Node:
    """Returns the node config from Flower's keys; raises ConfigError as `run_of`."""
    node = _read("node config", entries, Node())
    report = names_in(node.report)
    is_report = [*report] == ["nothing"] or (report and {*report} <= {*_REPORTS})
    steps = node.checkpoint_steps >= 1 or "checkpoint-steps" not in entries
    allowed = {
        "client": (node.client >= 0, "at least 0, the number of this client"),
        "folder": (node.folder, "a folder that outlives the SuperNode"),
        "report": (is_report, f"of {', '.join(_REPORTS)}, or nothing"),
        "domain": (not node.domain or node.data, "left out where data is not given"),
        "predictions": (not node.predictions or "accuracies" in report, "false, or report them"),
        "checkpoint-steps": (steps, "at least 1, or left out"),
    }
    _check("node config", node, allowed)
    return node._replace(report=",".join(report))


def config_of(source: str, changes: str, folder: str | Path) -> ConfigDict:
    """Returns the configuration of `Run.config` and `Run.changes`; raises what `read` raises.

    `folder` is the app's folder, in which the file is looked for first. rounds=0 changes nothing
    here: a configuration has rounds, see `Run.only_evaluates`.
    """
    changes = _NO_ROUNDS.sub("", changes)
    beside = Path(folder) / source
    source = str(beside) if beside.is_file() else source
    return read(f"{source}:{changes}" if changes else source)


def deployed(config: ConfigDict) -> ConfigDict:
    """Returns a copy without the keys of a simulation: the server decides who takes part."""
    config = config.copy_and_resolve_references()
    config.mesh.clients, config.population, config.baselines = 1, "device", ()
    config.clients_per_round = config.eval_clients = 0
    config.participation = "uniform"
    return config


def adds_noise(config: ConfigDict, side: str) -> bool:
    """Returns whether a side, "client" or "server", adds noise that no one can repeat.

    The server and all clients know `config.seed`. So the side that `config.privacy` names seeds
    its noise with random numbers of the operating system, which never leave it. If
    its option `seed` is set, the noise equals the simulation's and protects no one.
    """
    choice = privacy_of(config)
    return bool(choice and choice.noise and choice.at == side and choice.seed is None)


def _read(title: str, entries: Mapping[str, Any], settings: _Settings) -> _Settings:
    """Returns the settings with the given values; raises ConfigError for unknown keys and types."""
    defaults = {name.replace("_", "-"): value for name, value in settings._asdict().items()}
    for key, value in entries.items():
        if key in _OF_FLOWER:
            continue
        if key not in defaults:
            raise ConfigError(f"the {title} has no key {brief(key)}{nearest(key, defaults)}")
        kind = type(defaults[key])
        value = float(value) if kind is float and type(value) is int else value
        if type(value) is not kind:
            raise ConfigError(f"the {title}'s {key}={brief(value)} must be of type {kind.__name__}")
        settings = settings._replace(**{key.replace("-", "_"): value})
    return settings


def _check(title: str, settings: Any, allowed: Mapping[str, tuple[Any, str]]) -> None:
    """Raises ConfigError for the first of key -> (whether its value is right, what is allowed)."""
    for key, (holds, text) in allowed.items():
        if not holds:
            value = getattr(settings, key.replace("-", "_"))
            raise ConfigError(f"the {title}'s {key}={brief(value)} must be {text}")
