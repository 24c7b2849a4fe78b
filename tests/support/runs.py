"""Runs so small that a test can afford them."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from fedjax_bn import main
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.run import train
from fedjax_bn.run.config import base, flatten
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.method import follows_rounds
from fedjax_bn.training import checkpoint, plots
from fedjax_bn.training.callbacks.tensorboard import scalars_of
from fedjax_bn.training.experiment import Experiment

ROOT = Path(__file__).parents[2]
NAMES = ("ant", "bee", "cow", "dog")


def split(rng: np.random.Generator, size: int, shift: float) -> Split:
    """Three classes in R^6 around different centres, all moved by the domain's shift."""
    labels = rng.permutation(np.arange(size, dtype=np.int32) % 3)
    centres = np.eye(3, 6, dtype=np.float32)[labels]
    noise = rng.standard_normal((size, 6), dtype=np.float32)
    return Split(np.float32(2) * centres + noise + np.float32(shift), labels)


def dataset(validation: bool = True) -> Dataset:
    """Four domains of unequal sizes with features f32[N, 6] in three classes."""
    rng = np.random.Generator(np.random.PCG64(7))
    domains = []
    for shift, (name, size) in enumerate(zip(NAMES, (22, 18, 11, 15), strict=True)):
        train = split(rng, size, shift)
        held_out = split(rng, 20 - shift, shift) if validation else None
        domains.append(Domain(name, train, held_out, split(rng, size // 2 + shift, shift)))
    return Dataset("tiny", 3, tuple(domains), mean=(0.5,), std=(0.5,))


DATA = dataset()
COMPILED: dict[object, Any] = {}
FINISHED: dict[str, Path] = {}


def install(monkeypatch, data: Dataset | None = None, draw: bool = False) -> None:
    """Makes `data.name=tiny` known for one test; equal configurations on `DATA` compile once."""
    data_of = data or DATA
    monkeypatch.setitem(experiment.DATASETS, "tiny", lambda config: data_of)
    if not draw:
        monkeypatch.setattr(plots, "samples", lambda domains, **options: b"")
    monkeypatch.setattr(train, "batch_accuracy", lambda *given: None)  # a program for each run
    if data is None:
        monkeypatch.setattr(train, "prepare", _prepared_once(train.prepare))
        for name in ("open_rounds", "evaluator"):
            monkeypatch.setattr(train, name, _once(getattr(train, name)))


def _prepared_once(prepare: Callable) -> Callable:
    """`prepare`, which builds equal configurations once."""

    def remembered(config: ConfigDict, *rest: object) -> tuple:
        known, plan = json.loads(config.to_json_best_effort(sort_keys=True)), {}
        # What is built and compiled does not depend on these, unless a plan follows from one.
        for name in ("rounds", "eval_every", "checkpoint_every"):
            if type(known[name]) is int and known[name] > 0 and not follows_rounds(config):
                plan[name] = known.pop(name)
        plan |= {name: known.pop(name) for name in ("profile", "on_nonfinite")}
        key = json.dumps(known)
        if key not in COMPILED:
            COMPILED[key] = prepare(config, *rest)
        experiment, *others = COMPILED[key]
        plan |= {"keys": dict(flatten(config))}
        return experiment._replace(plan=experiment.plan._replace(**plan)), *others

    return remembered


def _once(function: Callable) -> Callable:
    """The function, called once for all experiments of one method that `prepare` has built."""

    @wraps(function)  # whose name is a part of the key, also where it is installed twice
    def remembered(*given: object) -> object:
        method = next(one for one in given if isinstance(one, Experiment)).method
        key = function.__name__, id(method)
        if key not in COMPILED:
            made = function(*given)
            if hasattr(made, "note"):
                if "stay on the device" not in made.note:  # a stream is opened again
                    return made
                made = made._replace(compile=_first_of(made.compile))
            COMPILED[key] = made, method  # kept, so that no other has its id
        return COMPILED[key][0]

    return remembered


def _first_of(function: Callable) -> Callable:
    """The function, whose first result is that of every call."""
    results = []

    def first(argument: object) -> object:
        if not results:
            results.append(function(argument))
        return results[0]

    return first


def config(**changes: object) -> ConfigDict:
    """The configuration of a tiny run; `__` in a name means the dot of a nested key."""
    tiny = {"model": "MLP", "rounds": 6, "batch_size": 4, "eval_every": 2, "checkpoint_every": 2}
    tiny |= {"seed": 2, "mesh.clients": 1}  # of the two devices that tests have
    tiny |= {"data.name": "tiny", "data.path": "none", "target": "dog"}
    tiny |= {key.replace("__", "."): value for key, value in changes.items()}
    config = base()
    config.update_from_flattened_dict(tiny)
    return config


def run(folder: Path, **changes: object) -> dict:
    """Trains in this process and returns the summary."""
    return train.run(config(**changes), folder, say=lambda text: None)


def finished(folder: Path, **changes: object) -> Path:
    """The folder with a finished run on the tiny data, copied where it was made before."""
    key = config(**changes).to_json_best_effort(sort_keys=True)
    if key not in FINISHED:
        FINISHED[key] = folder.with_name(f"{folder.name}-kept")  # which no test changes
        with pytest.MonkeyPatch.context() as patch:
            install(patch)
            run(FINISHED[key], **changes)
    return Path(shutil.copytree(FINISHED[key], folder, dirs_exist_ok=True))


class Killed(BaseException):
    """Means kill -9 inside this process: nothing catches it."""


def unfinished(folder: Path, of: ConfigDict) -> Path:
    """The folder of a run that was killed after its last round, before it deleted checkpoints."""

    def die(place: Path) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "delete_earlier", die)
        with pytest.raises(Killed):
            train.run(of, folder, say=lambda text: None)
    return folder


def saved(folder: Path, like: object, kind: str = "latest", round: int | None = None) -> object:
    """The leaves of a checkpoint as NumPy arrays."""
    if kind == "latest" and not steps(folder):
        kind = "selected"  # it was the last round too
    with checkpoint.open_folder(folder / "checkpoints" / kind, keep=2) as manager:
        return jax.tree.map(np.asarray, checkpoint.restore(manager, like, round))


def steps(folder: Path, kind: str = "latest") -> list[int]:
    """Rounds of which there is a checkpoint."""
    names = [path.name for path in (folder / "checkpoints" / kind).iterdir()]
    return sorted(int(name) for name in names if name.isdecimal())


def lines(folder: Path) -> list[dict]:
    """The records of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def lines_written(folder: Path) -> list[bytes]:
    """The lines of metrics.jsonl as they are, torn ones too."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads: tag -> (round, value)."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "events"), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def expected_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The same from metrics.jsonl."""
    tags: dict[str, list] = {}
    for line in lines(folder):
        for tag, value in scalars_of(line):
            tags.setdefault(tag, []).append((line["round"], float(np.float32(value))))
    return tags


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by each program that JAX compiles."""
    compiled = []

    def count(event: str, seconds: float, **rest: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield compiled
    finally:
        if hasattr(jax.monitoring, "unregister_event_duration_listener"):  # jax 0.7 has none
            jax.monitoring.unregister_event_duration_listener(count)


def without_times(record: dict) -> dict:
    """A record or summary without what the clock says."""
    clocks = {"seconds", "seconds_per_round", "compile_seconds", "samples_per_second"}
    return {key: value for key, value in record.items() if key not in clocks}


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Modification time and content of every file below a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def command(*arguments: str) -> int:
    """`python -m fedjax_bn.main ARGUMENTS` in this process; returns the exit status."""
    try:
        main.main(["main", *arguments])
    except SystemExit as stop:
        return stop.code
    return 0
