"""Prepares a run: the experiment, the random keys, and the state before the first round.

With `start_from` the first state has the model of a finished run. Only the arrays of its checkpoint
are read: no code that the other workdir names is imported.
"""

import hashlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_bn import models
from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.arguments.errors import ConfigError, UserError, as_config_errors
from fedjax_bn.arguments.text import brief
from fedjax_bn.federation import FederatedState
from fedjax_bn.models import pretrained
from fedjax_bn.run.experiment.build import Experiment, build
from fedjax_bn.sharing import Variables, filled, join, path_names
from fedjax_bn.training import checkpoint
from fedjax_bn.training.programs import keep_compiled
from fedjax_bn.training.start import Keys, check_shapes, initial_variables, make_keys, make_start
from fedjax_bn.training.workdir import CLAIM, Record, read_json


def prepare(
    config: ConfigDict,
    make: Callable[[ConfigDict], Experiment] = build,
    traced: bool = True,
    clients: int = 0,
) -> tuple[Experiment, Keys, Callable[[], FederatedState]]:
    """Builds the experiment, the keys and a function that makes the state before the first round.

    Args:
      config, make: the run's keys, and what builds the experiment from them.
      traced: whether to trace a round as a check, which takes a second or more.
      clients: K, if the experiment has only one of the clients and the state only one row; else 0.

    Raises:
      ConfigError: the configuration or the data that it names cannot be used.
    """
    keep_compiled(config.compilation_cache)
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"config.wandb={config.wandb!r} needs a package: `pip install wandb`")
    sizes = (min(clients, 1), clients)
    with as_config_errors():
        experiment = make(config)
        keys = make_keys(config.seed)
        if traced:
            check_shapes(experiment, make_start(experiment, keys, None, *sizes), clients)
        fixed, notes = _load_weights(experiment)
        start = make_start(experiment, keys, fixed, *sizes)
        if experiment.participation.on_host:
            _check_rows_alike(experiment, keys)
        return experiment._replace(notes=experiment.notes + notes), keys, start


def _check_rows_alike(experiment: Experiment, keys: Keys) -> None:
    # On the host all clients start with one row, which is right only if it is everybody's.
    start = make_start(experiment, keys, rows=len(experiment.internal.domains))
    for leaf in jax.tree.leaves(jax.jit(lambda: start().weighing)()):
        if (leaf != leaf[:1]).any():
            raise ConfigError(
                "config.weigh begins with other memory for some clients than for others, which "
                "rows on the host do not have: set population=device"
            )


def _load_weights(experiment: Experiment) -> tuple[Variables | None, tuple[str, ...]]:
    """Returns the variables from `start_from` or `pretrained` (None for others), and notes."""
    network, model = inspect.unwrap(experiment.model), experiment.plan.model
    start_from, weights = experiment.plan.start_from, experiment.plan.pretrained
    like = jax.eval_shape(lambda key: initial_variables(experiment, key), jax.random.key(0))
    if start_from:
        note = f"all clients start from the model of the run {start_from} (start_from)"
        return _starting_model(start_from, model, like), (note,)
    if not weights:
        with_weights = (models.AlexNet, models.DenseNet, models.ResNet, models.YOLOv5)
        with_weights += (models.ConvNeXt, models.ViT)
        note = f"{model} starts from random weights, because pretrained is empty"
        return None, (note,) * isinstance(network, with_weights)
    # Leaves that the weights lack, such as another head, stay forms, and are drawn by the seed.
    variables, notes = pretrained.load_pretrained(weights, network, like)
    fixed = jax.tree.map(
        lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf),
        variables,
    )
    return fixed, notes


def _starting_model(start_from: str, model: str, like: Variables) -> Variables:
    """Returns the collections of `like` from the selected round of the run `config.start_from`."""
    # They are what an unseen client would receive: the shared leaves, and the mean of the personal
    # leaves with the last round's weights. The clients' memory, and what the other method trained
    # in addition to the model, are left out.
    culprit = f"config.start_from={brief(start_from)}"
    try:
        tree = checkpoint.all_arrays(_checkpoint_of(start_from))
        tree = tree.get("state", tree)  # a population has its rows in other files
        count = len(tree["weights"])
        personal = jax.tree.map(lambda leaf: jnp.asarray(leaf[:count]), tree["personal"])
        loaded = join(tree["shared"], weighted_mean(personal, tree["weights"]))
        loaded = filled(loaded, tree.get("frozen") or ())
    except UserError as error:
        raise ConfigError(f"{culprit}: {error}") from error
    loaded = {name: loaded.get(name) for name in like}
    loaded_shapes, model_shapes = (
        {"/".join(path_names(p)): leaf.shape for p, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (loaded, like)
    )
    for name in sorted({*loaded_shapes, *model_shapes}):
        shapes = loaded_shapes.get(name, "nothing"), model_shapes.get(name, "nothing")
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"{culprit} holds another model than config.model={brief(model)} with these "
                f"classes: {name} is {shapes[0]} there and {shapes[1]} here; give the same "
                "model and classes, or another run"
            )
    return jax.tree.map(lambda leaf, form: jnp.asarray(leaf, form.dtype), loaded, like)


def starting_record(start_from: str) -> Record:
    """Returns {"start_from": {"round", "sha256"}} for config.json, or {} without a start."""
    if not start_from:
        return {}
    try:
        folder = _checkpoint_of(start_from)
        sums = (folder / checkpoint.CHECKSUMS).read_bytes()
    except (UserError, OSError) as error:
        raise ConfigError(f"config.start_from={brief(start_from)}: {error}") from error
    digest = hashlib.sha256(sums).hexdigest()
    return {"start_from": {"round": int(folder.name), "sha256": digest}}


def _checkpoint_of(start_from: str) -> Path:
    """Returns the folder of a finished run's selected checkpoint, or of its latest one."""
    workdir = Path(start_from).expanduser()
    if not (workdir / "summary.json").exists():
        raise ConfigError(f"{workdir} is not the workdir of a run that has finished: give one")
    read_json(workdir / "config.json", CLAIM)
    for kind in ("selected", "latest"):
        names = (path.name for path in (workdir / "checkpoints" / kind).glob("*"))
        if rounds := [int(name) for name in names if name.isdecimal()]:
            return workdir / "checkpoints" / kind / str(max(rounds))
    raise ConfigError("it holds no checkpoint: give the workdir of a run that has one")
