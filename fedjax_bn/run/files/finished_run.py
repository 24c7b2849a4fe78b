"""Opens a finished run: its configuration, its model, its selected round, without its data.

A workdir may come from anybody: code that only it names is not imported (`recorded_code`).
"""

import os
import re
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.arguments.choices import imports_refused
from fedjax_bn.arguments.errors import CheckpointError, WorkdirError
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.labels import no_labels
from fedjax_bn.federation import FederatedState
from fedjax_bn.run.config import check
from fedjax_bn.run.config.choices import participation_of
from fedjax_bn.run.config.defaults import base
from fedjax_bn.run.experiment.build import Experiment, assemble
from fedjax_bn.training import checkpoint, workdir
from fedjax_bn.training.mesh import form_on
from fedjax_bn.training.population import start_population
from fedjax_bn.training.records import have_trained
from fedjax_bn.training.result import Result
from fedjax_bn.training.start import make_keys, make_start
from fedjax_bn.training.workdir import FINISHED, Record

_PACKAGE = Path(__file__).resolve().parents[3]  # the folder that holds `fedjax_bn`
_INSTALLED = {"site-packages", "dist-packages"}


def read_about(folder: Path) -> Record:
    """Returns a finished run's config.json; a WorkdirError if it is missing or damaged."""
    for name in ("config.json", "summary.json"):
        if not (folder / name).exists():
            raise WorkdirError(f"{folder} has no {name}: give the workdir of a finished run")
    return workdir.read_json(folder / "config.json", FINISHED)


def configuration(flat: Record) -> ConfigDict:
    """Returns the configuration that a config.json holds; a WorkdirError if it is not valid."""
    config = base()
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in flat.items()}
    try:
        with config.unlocked():
            config.update_from_flattened_dict(values)
        check(config)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise WorkdirError(f"the run's config.json holds no configuration ({error})") from error
    return config


def remembered(about: Record, trust: bool = False) -> ConfigDict:
    """Returns a finished run's configuration; paths not found here are from where it started."""
    config, place = configuration(about["config"]), _started_in(about)
    # Compiled programs are code, so only a run that is trusted chooses their folder.
    if not trust and config.compilation_cache != base().compilation_cache:
        config.compilation_cache = ""
    path = config.data.path
    if place and path and not Path(path).exists() and (place / path).exists():
        config.data.path = str(place / path)
    trace = participation_of(config).trace
    if place and trace and not Path(trace).exists() and (place / trace).exists():
        started = f"trace={place / trace}"
        config.participation = config.participation.replace(f"trace={trace}", started)
    return config


def load_run(folder: str | os.PathLike[str], trust: bool = False) -> Result:
    """Returns a finished run of the command line, at its selected round, without its data.

        run = load_run("runs/quickstart")
        probabilities = run.predict(images, client="blueprint")  # as `evaluate --internal` tests it
        variables = run.variables("blueprint")

    Images have the stored form of the training images: `run.method.learned.prepare` standardizes
    them with the run's constants. With `trust`, code that the workdir names is imported, also from
    the folder where the run was started; without it only from folders on `PYTHONPATH`.

    Raises:
      WorkdirError, CheckpointError: the folder holds no finished run, or a damaged one.
      ValueError: the run names code that is not trusted, or something that does not exist.
    """
    folder = Path(folder)
    about = read_about(folder)
    config = remembered(about, trust)
    config.mesh.update(clients=1, batch=0)  # one device; the run's machine had others
    config.adaptations = ()
    with recorded_code(folder, about, trust=trust):
        experiment, state, number = restore(folder, config, about["form"])
    history = _history(folder, number) or []
    summary = workdir.read_json(folder / "summary.json", workdir.SUMMARY)
    return Result(experiment.method, state, tuple(about["form"]["clients"]), summary, history)


def restore(
    folder: Path, config: ConfigDict, form: Record
) -> tuple[Experiment, FederatedState, int]:
    """Returns a run's model and method, the state of its selected round, and that round's number.

    `config` is the run's own, `form` that of its samples (`domain.form_of`).
    """
    experiment = assemble(config, dataset_of(form), ())
    # Only the form of the first state is needed: its values are those of the checkpoint.
    start = start_population(experiment, make_start(experiment, make_keys(config.seed)))
    return experiment, *restore_state(folder, form_on(jax.eval_shape(start), experiment.mesh))


def restore_state(folder: Path, like: FederatedState) -> tuple[FederatedState, int]:
    """Returns the state of a run's selected round, or else of its latest one, and its number.

    `like` has its form. No checkpoint, or one of another model, is a CheckpointError.
    """
    for checkpoints in (folder / "checkpoints" / name for name in ("selected", "latest")):
        if checkpoints.is_dir():
            with checkpoint.open_folder(checkpoints, keep=2) as manager:
                if steps := checkpoint.steps(manager):
                    return checkpoint.restore(manager, like), steps[-1]
    raise CheckpointError(f"{folder} holds no checkpoint: give the workdir of a run that has one")


def trained_clients(folder: Path, clients: list[str], rounds: int) -> np.ndarray | None:
    """Returns bool[K], which clients have trained in the first rounds; None without records."""
    records = _history(folder, rounds)
    return None if records is None else have_trained(records, clients)


def _history(folder: Path, rounds: int) -> list[Record] | None:
    path = folder / "metrics.jsonl"  # what a Flower server has served has none
    return workdir.read_lines(path, rounds) if path.exists() else None


def dataset_of(form: Record) -> Dataset:
    """Returns the clients of a form (`domain.form_of`), each with one blank sample."""
    shape = form["shape"]
    sample = Split(np.zeros((1, *shape), form["dtype"]), no_labels(form, shape))
    domains = tuple(Domain(name, sample, sample, sample) for name in form["clients"])
    mean, std = tuple(form["mean"]), tuple(form["std"])
    return Dataset(form["dataset"], form["num_classes"], domains, mean, std)


def recorded_code(
    folder: Path, about: Record, typed: Iterable[Any] = (), trust: bool = False
) -> AbstractContextManager[None]:
    """Returns a context in which a run's own configuration imports only what its user allows.

    That are the names in `typed`, the values of keys that the user has set, and modules of folders
    on PYTHONPATH; with `trust` everything, also modules where the run was started.
    """
    place = _started_in(about)
    if trust:
        sys.path += [str(place)] * (place is not None and str(place) not in sys.path)
        return nullcontext()
    words = re.split(r"[\s,='\"()\[\]]+", " ".join(map(str, typed)))
    typed_names = {":".join(word.split(":")[:2]) for word in words if ":" in word}
    started = f" (the run was started in {place})" if place else ""
    refusal = (
        f"{folder} names it, which may come from anybody; if you trust that code{started}, add "
        "--trust, or put its folder on PYTHONPATH"
    )
    return imports_refused(
        lambda name: "" if name in typed_names or _on_users_path(name) else refusal
    )


def _started_in(about: Record) -> Path | None:
    """Returns the folder where a run was started; None if it does not exist here."""
    place = Path(about.get("started_in", ""))
    return place if place.is_absolute() and place.is_dir() else None


def _on_users_path(name: str) -> bool:
    """Returns whether `module:name` is of a user's own module, from a folder on PYTHONPATH."""
    spec = PathFinder.find_spec(re.split(r"[.:]", name)[0])
    if not (spec and spec.origin):  # any folder is found as a namespace package, without an origin
        return False
    module = Path(spec.origin).resolve()
    place = module.parents[1] if spec.submodule_search_locations else module.parent
    # A relative entry may be the current folder, which somebody may have sent.
    entries = map(Path, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    users_own = {entry.resolve() for entry in entries if entry.is_absolute()} - {_PACKAGE}
    return place in users_own and _INSTALLED.isdisjoint(place.parts)
