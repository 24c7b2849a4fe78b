"""What a run needs before its first round: the experiment, the random keys, the first state.

With `start_from` the first state has the model of a finished run. It is read from the arrays of a
checkpoint alone: nothing that the other workdir names is imported.
"""

import hashlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_bn import models
from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.data.regular_files import Refused, read_regular
from fedjax_bn.engine.backend import for_one_run
from fedjax_bn.federation import FederatedState
from fedjax_bn.models import pretrained
from fedjax_bn.run.errors import ConfigError, UserError
from fedjax_bn.run.experiment.build import (
    Experiment,
    build,
    initial_variables,
)
from fedjax_bn.run.experiment.shapes import check_shapes
from fedjax_bn.run.files import checkpoint
from fedjax_bn.run.files.forms import CLAIM
from fedjax_bn.run.files.workdir import read_json
from fedjax_bn.run.processes.mesh import everywhere, place_copies, shardings_of
from fedjax_bn.run.training.compilation_cache import keep_compiled
from fedjax_bn.run.training.population import Held, check_population, num_clients, on_disk
from fedjax_bn.run.training.records import Record
from fedjax_bn.sharing import Variables, describe, join, path_names, split_like


class Keys(NamedTuple):
    """The random keys of a run, all from `config.seed`."""

    model: jax.Array
    method: jax.Array
    data: jax.Array
    participation: jax.Array


def prepare(
    config: ConfigDict,
    make: Callable[[ConfigDict], Experiment] = build,
    traced: bool = True,
    clients: int = 0,
) -> tuple[Experiment, Keys, Callable[[], FederatedState]]:
    """Builds the experiment, the keys and a function that makes the state before the first round.

    Args:
      config: the run's.
      make: builds the experiment.
      traced: whether a round is traced to see that it works, which takes a second or more.
      clients: how many there are in all, where the experiment has one of them and the state one
        row; 0 for those that it has.

    Raises:
      ConfigError: whatever is wrong with the configuration or the data it names.
    """
    keep_compiled(config.compilation_cache)
    _check_tracking(config.wandb)
    sizes = (min(clients, 1), clients)
    try:
        experiment = make(config)
        check_population(config, len(experiment.internal.domains))
        keys = make_keys(config)
        if traced:
            check_shapes(config, experiment, make_start(config, experiment, keys, None, *sizes))
        fixed, notes = _load_pretrained(config, experiment)
        start = make_start(config, experiment, keys, fixed, *sizes)
        _check_rows_alike(config, experiment, keys)
        return experiment._replace(notes=experiment.notes + notes), keys, start
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


def _check_tracking(project: str) -> None:
    """Raises ConfigError if a project of Weights & Biases is named and wandb is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"config.wandb={project!r} needs the package wandb, which is not installed: "
            "`pip install wandb`, or leave it empty and see the run in TensorBoard"
        )


def make_keys(config: ConfigDict) -> Keys:
    """Returns the random keys of a run."""
    return Keys(*jax.random.split(jax.random.key(config.seed), len(Keys._fields)))


def make_start(
    config: ConfigDict,
    experiment: Experiment,
    keys: Keys,
    fixed: Variables | None = None,
    rows: int = 0,
    clients: int = 0,
) -> Callable[[], FederatedState]:
    """Returns `start() -> state` before the first round; `fixed` as `_load_pretrained` gives it.

    The state has `rows` rows, by default one a client, or one in all where they lie on the disk;
    its server's part is that of all `clients`, by default the experiment's.
    """
    clients = clients or len(experiment.internal.domains)
    rows = rows or (1 if on_disk(config, clients) else clients)

    def begin(fixed: Variables | None) -> FederatedState:
        variables = initial_variables(experiment, keys.model)
        if fixed is not None:
            variables = join(fixed, split_like(variables, fixed)[1])
        whole = experiment.method.init(keys.method, variables, clients)
        if rows == clients:
            return whole
        # Compiled, it makes nothing of the others' rows, which nobody reads.
        state = experiment.method.init(keys.method, variables, rows)._replace(server=whole.server)
        own = jax.tree.map(lambda leaf: leaf[:rows], (state.personal, state.memory))
        return state._replace(personal=own[0], memory=own[1])

    mesh = experiment.mesh
    if mesh is None:
        return partial(for_one_run(begin), fixed)
    form = jax.eval_shape(begin, fixed)
    spread = shardings_of(form, mesh) if rows == clients else everywhere(mesh)
    begin = for_one_run(begin, out_shardings=spread)
    return partial(begin, place_copies(fixed, mesh))


def _check_rows_alike(config: ConfigDict, experiment: Experiment, keys: Keys) -> None:
    """Raises ConfigError where rows lie on the disk and a weighing rule begins them differently.

    Personal leaves and memory begin alike by what `federate` is.
    """
    clients = len(experiment.internal.domains)
    start = make_start(config, experiment, keys, rows=clients)
    if not on_disk(config, clients) or not jax.eval_shape(start).weighing:
        return
    for leaf in jax.tree.leaves(jax.jit(lambda: start().weighing)()):
        if (leaf != leaf[:1]).any():
            raise ConfigError(
                f"config.weigh={brief(config.weigh)} begins with other memory for some clients "
                "than for others, which rows on the disk do not have: set population=device"
            )


def _load_pretrained(
    config: ConfigDict, experiment: Experiment
) -> tuple[Variables | None, tuple[str, ...]]:
    """The variables from `config.start_from` or `pretrained`, None for other leaves, and notes.

    Raises:
      ValueError, OSError, ImportError: the weights are missing or do not fit.
    """
    like = jax.eval_shape(lambda key: initial_variables(experiment, key), jax.random.key(0))
    if config.start_from:
        note = f"all clients start from the model of the run {config.start_from} (start_from)"
        return starting_model(config, like), (note,)
    if not config.pretrained:
        known = (models.AlexNet, models.DenseNet, models.ResNet, models.YOLOv5)
        could = isinstance(inspect.unwrap(experiment.model), known)
        why = f"{config.model} starts from random weights, because pretrained is empty"
        return None, (why,) * could
    network = inspect.unwrap(experiment.model)
    variables, notes = pretrained.load(config.pretrained, network, like)
    fixed = jax.tree.map(
        lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf),
        variables,
    )
    return fixed, notes


def data_hash(experiment: Experiment) -> str:
    """Returns a SHA-256 of the data split, unseen clients included, and of the trace if any."""
    domains = experiment.internal.domains + experiment.unseen
    data = fingerprint(experiment.internal._replace(domains=domains))
    trace = experiment.participation.trace
    if trace is None:
        return data
    return hashlib.sha256(data.encode() + trace.tobytes()).hexdigest()


def partition_table(config: ConfigDict, state: FederatedState | Held, modules: bool = True) -> str:
    """Returns a table of the shared and the personal leaves, with counts and bytes of one client.

    Args:
      config: the run's.
      state: before the next round.
      modules: whether the table has a line for each module, or sums alone.
    """
    own = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state.personal
    )
    variables = join(state.shared, own)
    mask = jax.tree.map(lambda leaf: leaf is not None, state.shared, is_leaf=lambda x: x is None)
    return f"{config.method} on {config.model}, {num_clients(state):,} clients\n" + (
        describe(variables, mask, modules)
    )


def starting_model(config: ConfigDict, like: Variables) -> Variables:
    """Returns the collections of `like` from the selected round of the run `config.start_from`.

    They are what an unseen client would receive: the shared leaves, and the mean of the personal
    ones with the last round's weights. What clients remember, and what the other method trained
    besides the model, is not taken.

    Args:
      config: the run's.
      like: the model's collections, as arrays or `jax.ShapeDtypeStruct`.

    Raises:
      ConfigError: there is no finished run, its checkpoint is damaged, or the model is another one.
    """
    what = f"config.start_from={brief(config.start_from)}"
    try:
        tree = checkpoint.all_arrays(_checkpoint_of(Path(config.start_from)))
        tree = tree.get("state", tree)  # the rows of a population lie elsewhere
        count = len(tree["weights"])
        personal = jax.tree.map(lambda leaf: jnp.asarray(leaf[:count]), tree["personal"])
        found = join(tree["shared"], weighted_mean(personal, tree["weights"]))
    except UserError as error:
        raise ConfigError(f"{what}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} holds no state of a federation ({error}): give the workdir of a finished run"
        ) from error
    found = {name: found.get(name) for name in like}
    if misfit := _misfit(found, like):
        raise ConfigError(
            f"{what} holds another model than config.model={brief(config.model)} with these "
            f"classes: {misfit}; give the same model and classes, or another run"
        )
    return jax.tree.map(lambda leaf, form: jnp.asarray(leaf, form.dtype), found, like)


def starting_record(config: ConfigDict) -> Record:
    """Returns the entry of config.json for the start, {"start_from": {"round", "sha256"}}, or {}.

    Raises:
      ConfigError: there is no finished run.
    """
    if not config.start_from:
        return {}
    try:
        folder = _checkpoint_of(Path(config.start_from))
        sums = read_regular(folder / checkpoint.CHECKSUMS)
    except (UserError, OSError, Refused) as error:
        raise ConfigError(f"config.start_from={brief(config.start_from)}: {error}") from error
    digest = hashlib.sha256(sums).hexdigest()
    return {"start_from": {"round": int(folder.name), "sha256": digest}}


def _checkpoint_of(workdir: Path) -> Path:
    """The folder of a finished run's selected checkpoint, or of its latest one."""
    if not (workdir / "config.json").exists():
        raise ConfigError(f"{workdir} is not the workdir of a run: give one that has finished")
    read_json(workdir / "config.json", CLAIM)
    if not (workdir / "summary.json").exists():
        raise ConfigError(f"{workdir} holds no finished run: train it to its end first")
    for kind in ("selected", "latest"):
        names = (path.name for path in (workdir / "checkpoints" / kind).glob("*"))
        if rounds := [int(name) for name in names if name.isdecimal()]:
            return workdir / "checkpoints" / kind / str(max(rounds))
    raise ConfigError("it holds no checkpoint: give the workdir of a run that has one")


def _misfit(found: Variables, like: Variables) -> str:
    """The first leaf that only one of them has, or in another shape; empty where all fit."""
    leaves = (jax.tree_util.tree_leaves_with_path(tree) for tree in (found, like))
    theirs, ours = ({"/".join(path_names(p)): leaf.shape for p, leaf in one} for one in leaves)
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            there, here = (of.get(name, "nothing") for of in (theirs, ours))
            return f"{name} is {there} there and {here} here"
    return ""
