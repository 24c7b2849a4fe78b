"""Reads a finished run from its workdir: its configuration, its model, its selected round.

A run's config.json holds the form of its samples, so neither its training data nor their path is
needed.
"""

from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import CheckpointError, WorkdirError
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.label_trees import is_of_masks, no_labels
from fedjax_bn.engine.images import impossible_samples
from fedjax_bn.federation import FederatedState
from fedjax_bn.run.config.defaults import base
from fedjax_bn.run.config.keys import check
from fedjax_bn.run.config.trust import started_in
from fedjax_bn.run.experiment.build import Experiment, assemble
from fedjax_bn.training import checkpoint, workdir
from fedjax_bn.training.mesh import form_on
from fedjax_bn.training.population import start_population
from fedjax_bn.training.records import have_trained
from fedjax_bn.training.start import make_keys, make_start
from fedjax_bn.training.workdir import FINISHED, Record


def read_about(folder: Path) -> Record:
    """Returns the content of a finished run's config.json.

    Raises:
      WorkdirError: there is no finished run, or its config.json is damaged.
    """
    if not (folder / "config.json").exists():
        # `target=each` leaves a folder of workdirs.
        if inside := sorted(path.parent.name for path in folder.glob("*/config.json")):
            raise WorkdirError(
                f"{folder} is not a run's workdir, but {', '.join(inside)} in it are: give one"
            )
        raise WorkdirError(f"{folder} holds no run: give the workdir of a finished run")
    about = workdir.read_json(folder / "config.json", FINISHED)
    if not (folder / "summary.json").exists():
        raise WorkdirError(
            f"{folder} holds a run that has not finished: give the command that started it again, "
            "then evaluate"
        )
    return about


def configuration(flat: Record) -> ConfigDict:
    """Returns the configuration that a config.json holds.

    Raises:
      WorkdirError: the record is not a valid configuration.
    """
    config = base()
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in flat.items()}
    try:
        with config.unlocked():
            config.update_from_flattened_dict(values)
        check(config)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise WorkdirError(
            f"the run's config.json holds no configuration ({error}): give the workdir of another "
            "run"
        ) from error
    return config


def remembered(about: Record, trust: bool = False) -> ConfigDict:
    """Returns a finished run's configuration, with relative paths taken from where it was started.

    A path that exists here stays as it is.

    Args:
      about: the run's config.json.
      trust: whether to use the folder of compiled programs that the run names. These programs are
        code, so without trust a folder other than the default is not used.

    Raises:
      WorkdirError: as `configuration`.
    """
    config, place = configuration(about["config"]), started_in(about)
    if not trust and config.compilation_cache != base().compilation_cache:
        config.compilation_cache = ""
    for group, key in ((config.data, "path"), (config.participation, "trace")):
        if place and group[key] and not Path(group[key]).exists() and (place / group[key]).exists():
            group[key] = str(place / group[key])
    return config


def restore(
    folder: Path, config: ConfigDict, form: Record
) -> tuple[Experiment, FederatedState, int]:
    """Returns a run's model and method, the state of its selected round, and that round's number.

    Args:
      folder: the workdir.
      config: the run's own, as `configuration` makes it.
      form: of its samples, as `domain.form_of` makes it.

    Raises:
      CheckpointError: as `restore_state`.
      ConfigError, ValueError: the configuration names something that does not exist.
    """
    experiment = assemble(config, dataset_of(form), ())
    start = make_start(experiment, make_keys(config.seed))
    start = start_population(experiment, start)
    like = form_on(jax.eval_shape(start), experiment.mesh)
    return experiment, *restore_state(folder, like)


def trained_clients(folder: Path, clients: list[str], rounds: int) -> np.ndarray | None:
    """Returns bool[K], which clients have trained in the first rounds; None without records.

    Raises:
      WorkdirError: records of those rounds are missing or damaged.
    """
    lines = folder / "metrics.jsonl"  # what a Flower server has served has none
    return have_trained(workdir.read_lines(lines, rounds), clients) if lines.exists() else None


def dataset_of(form: Record) -> Dataset:
    """Returns the clients of a form (`domain.form_of`), each with one blank sample."""
    shape = form["shape"]
    sample = Split(np.zeros((1, *shape), form["dtype"]), no_labels(form, shape))
    domains = tuple(Domain(name, sample, sample, sample) for name in form["clients"])
    mean, std = tuple(form["mean"]), tuple(form["std"])
    return Dataset(form["dataset"], form["num_classes"], domains, mean, std)


def impossible(form: Record) -> str:
    """Returns the part of a form that no samples can have, such as "shape"; "" if some can."""
    clients = form["clients"]
    if not clients or len(set(clients)) < len(clients):
        return "clients"
    if "masks" in form and not is_of_masks(form["masks"], form["shape"]):
        return "masks"
    return impossible_samples(form["shape"], form["dtype"], form["mean"], form["std"])


def restore_state(folder: Path, like: FederatedState) -> tuple[FederatedState, int]:
    """Returns the state of a run's selected round, or else of its latest one, and its number.

    Args:
      folder: the run's workdir.
      like: a state of the same form, arrays or `jax.ShapeDtypeStruct`.

    Raises:
      CheckpointError: the folder has no checkpoint, or one that is damaged or of another model.
    """
    for name in ("selected", "latest"):
        checkpoints = folder / "checkpoints" / name
        if not checkpoints.is_dir():
            continue
        with checkpoint.open_folder(checkpoints, keep=2) as manager:
            if steps := checkpoint.steps(manager):
                return checkpoint.restore(manager, like), steps[-1]
    raise CheckpointError(f"{folder} holds no checkpoint: give the workdir of a run that has one")
