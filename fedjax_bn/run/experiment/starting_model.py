"""The model of a finished run, from which another run starts (`start_from`).

It is read from the arrays of a checkpoint alone: nothing that the other workdir names is imported.
"""

import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.regular_files import Refused, read_regular
from fedjax_bn.run.errors import ConfigError, UserError
from fedjax_bn.run.files import checkpoint
from fedjax_bn.run.files.forms import CLAIM
from fedjax_bn.run.files.workdir import read_json
from fedjax_bn.run.training.records import Record
from fedjax_bn.sharing import Variables, join, path_names

PyTree = Any


def starting_model(config: ConfigDict, like: Variables) -> Variables:
    """Returns the collections of `like` from the selected round of the run `config.start_from`.

    They are what an unseen client would receive: shared leaves, and of personal ones the mean with
    the last round's weights. What clients remember is not taken, and what the other method trained
    besides the model neither.

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
    """What config.json says of the start: {"start_from": {"round", "sha256"}}; {} without one.

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
        raise ConfigError(f"{workdir} is no workdir of a run: give one that has finished")
    read_json(workdir / "config.json", CLAIM)
    if not (workdir / "summary.json").exists():
        raise ConfigError(f"{workdir} holds no finished run: train it to its end first")
    for kind in ("selected", "latest"):
        names = (path.name for path in (workdir / "checkpoints" / kind).glob("*"))
        if rounds := [int(name) for name in names if name.isdecimal()]:
            return workdir / "checkpoints" / kind / str(max(rounds))
    raise ConfigError("it holds no checkpoint: give the workdir of a run that has one")


def _misfit(found: Variables, like: Variables) -> str:
    """The first leaf that one of both lacks or has in another shape; empty where all fit."""
    theirs, ours = ({_name(p): leaf.shape for p, leaf in _leaves(t)} for t in (found, like))
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            there, here = (of.get(name, "nothing") for of in (theirs, ours))
            return f"{name} is {there} there and {here} here"
    return ""


def _leaves(tree: PyTree) -> list:
    return jax.tree_util.tree_leaves_with_path(tree)


def _name(path: tuple) -> str:
    return "/".join(path_names(path))
