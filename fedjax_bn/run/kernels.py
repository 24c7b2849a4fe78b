"""Which algorithms a run's convolutions take on CPU: by the table, or as measured on this CPU.

What was measured is kept beside the compiled programs, in one file for each kind of machine, so
that the next run chooses alike and has the same bits; and each run records what it took in its
workdir, by which it goes on when it is started again, wherever that is.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock
from ml_collections import ConfigDict

from fedjax_bn.backend import on_cpu
from fedjax_bn.models.cpu.algorithms import ALGORITHMS
from fedjax_bn.models.cpu.choice import Rule, Shapes, by_table, choosing
from fedjax_bn.models.cpu.measure import fastest, measured
from fedjax_bn.run.errors import ConfigError, WorkdirError
from fedjax_bn.run.forms import TEXT
from fedjax_bn.run.machine import describe_machine
from fedjax_bn.run.processes import by_first
from fedjax_bn.run.workdir import read_json, write_atomically, write_json

_RECORD, _FORM = "kernels.json", {"*": TEXT}
_SECONDS = 120.0  # that measuring takes in one run; then the table decides

Choices = dict[str, str]  # a convolution's shapes as text -> the name of an algorithm


def kernels(
    config: ConfigDict, folder: Path, say: Callable[[str], None]
) -> AbstractContextManager[None]:
    """The context in which a run's programs are traced, by `config.cpu_kernels`.

    Of several processes none measures, so that they choose alike: they take what the first one's
    file has, and the table's for the rest.

    Args:
      config: the run's.
      folder: its workdir, which this process, or the first of several, owns.
      say: where messages go.

    Raises:
      ConfigError: "measured", and no folder keeps what is measured.
      WorkdirError: the record is damaged, or cannot be written.
    """
    if config.cpu_kernels == "table" or not on_cpu():
        return choosing(None)
    kept = jax.config.jax_compilation_cache_dir
    if not kept or "://" in kept:
        raise ConfigError(
            "config.cpu_kernels='measured' keeps what it measures beside the compiled programs, "
            "but there is no folder for them: set config.compilation_cache to a local folder, or "
            "cpu_kernels='table'"
        )
    file = kept_in(Path(kept))
    if jax.process_count() > 1:
        taken = by_first(lambda: _recorded(folder) or _read(file))
        by_first(lambda: write_json(folder / _RECORD, taken))
        return _by(taken)
    return choosing(_measuring(file, _recorded(folder), folder / _RECORD, say))


def as_recorded(folder: Path) -> AbstractContextManager[None]:
    """The context with what a run took, and the table's for what it did not need.

    Raises:
      WorkdirError: the record is damaged.
    """
    return _by(_recorded(folder))


def _by(taken: Choices) -> AbstractContextManager[None]:
    return choosing(lambda shapes: taken.get(str(shapes)) or by_table(shapes))


def kept_in(folder: Path) -> Path:
    """The file of this kind of machine: by its CPU, its cores and the versions."""
    about = describe_machine()
    parts = {**about["machine"], "versions": {n: about["versions"][n] for n in ("jax", "jaxlib")}}
    text = json.dumps(parts, sort_keys=True)
    return folder / f"kernels-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _measuring(file: Path, taken: Choices, record: Path, say: Callable[[str], None]) -> Rule:
    """What this run took before, else what the file has, else what is measured now."""
    spent = 0.0

    def rule(shapes: Shapes) -> str:
        nonlocal spent
        name = str(shapes)
        if name not in taken:
            found, start = _read(file).get(name), time.perf_counter()
            if found is None and spent < _SECONDS:
                if not spent:
                    say(f"measuring which convolutions are fastest on this CPU, once, for {file}")
                found = _keep(file, name, shapes)
                spent += time.perf_counter() - start
            taken[name] = found or by_table(shapes)
            write_json(record, taken)
        return taken[name]

    return rule


def _keep(file: Path, name: str, shapes: Shapes) -> str:
    """Measures and keeps a choice; where another process was faster, it is that one's."""
    seconds = measured(shapes)
    mine = fastest(seconds, by_table(shapes))
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock"), timeout=60):
        all_kept = _content(file)
        entry = all_kept.setdefault(name, {"algorithm": mine, "least_seconds": _least(seconds)})
        if entry.get("algorithm") not in ALGORITHMS:  # damaged
            entry["algorithm"] = mine
        write_atomically(file, json.dumps(all_kept, indent=1, sort_keys=True) + "\n")
    return entry["algorithm"]


def _least(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: min(own) for name, own in seconds.items()}


def _read(file: Path) -> Choices:
    """The choices in a file of `kept_in`; none of those that are damaged."""
    found = {name: entry.get("algorithm") for name, entry in _content(file).items()}
    return {name: algorithm for name, algorithm in found.items() if algorithm in ALGORITHMS}


def _content(file: Path) -> dict[str, dict[str, Any]]:
    """What the file holds, nothing where it is damaged: then it is measured anew."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(file.read_text())
        if isinstance(content, dict):
            return {name: entry for name, entry in content.items() if isinstance(entry, dict)}
    return {}


def _recorded(folder: Path) -> Choices:
    """What a run took before.

    Raises:
      WorkdirError: the record is damaged.
    """
    path = folder / _RECORD
    taken = read_json(path, _FORM) if path.exists() else {}
    for algorithm in taken.values():
        if algorithm not in ALGORITHMS:
            raise WorkdirError(
                f"{path} names {algorithm!r:.40}, but there are {', '.join(ALGORITHMS)}: move that "
                "folder away or give another --workdir"
            )
    return taken
