"""Writes and reads a served model's folder, for `fedjax-bn serve`, `fedjax-bn predict` and `load`.

    model.json      the model's name and options, its classes, the form of its samples, how bytes
                    are standardized, the adaptations with which it was tested
    variables.npz   its arrays, COLLECTION/MODULE/NAME
    programs/       each adaptation as StableHLO, see `serving.program`

A folder is arrays, and names of models and adaptations that belong to this library; nothing that it
names is imported. Its programs are code: the one of a model or adaptation that is not this
library's runs only if the user trusts the folder.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_bn import models
from fedjax_bn.adaptation.choice import ADAPTATIONS, choose_adaptation
from fedjax_bn.arguments.choices import call_chosen, naming, read_choice, split_choice
from fedjax_bn.arguments.text import nearest
from fedjax_bn.engine.images import standardize
from fedjax_bn.engine.named_arrays import to_named
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.serving.predictor import Predictor, from_choice
from fedjax_bn.serving.program import Program, damage_named, open_program, write_program
from fedjax_bn.sharing import Variables

FORM = 1  # the version of the folder's format

_ABOUT, _VARIABLES, _PROGRAMS = "model.json", "variables.npz", "programs"
_MODELS = {name: getattr(models, name) for name in models.__all__}
_SET_HERE = ("num_classes", "name", "parent")  # options of a model that its text cannot set


class About(NamedTuple):
    """The content of model.json."""

    form: int  # the version of the folder's format
    library: str  # the version of fedjax_bn that wrote the folder
    model: str  # the model's name and options, such as "ResNet18:width=16"
    compute_dtype: str  # in which the layers compute
    method: str
    dataset: str
    round: int
    classes: list  # their names, in the order of the probabilities
    shape: list  # of one stored sample
    dtype: str
    mean: list  # bytes reach the model as (u8/255 - mean)/std
    std: list
    adaptations: list  # with which the run tested unseen clients
    programs: dict  # adaptation -> the argument `about` of `open_program`
    batch_size: int  # B of tests with adaptations that set no other
    orientation: str  # "upright" or "stored", see `pixels.decode`
    masks: str  # how images of another size reach a model that segments: "resize" or "tiles"
    client: str = ""  # whose own model it is; "" for the one that an unseen client receives
    # how slices of scans become samples, see `data.masks.volumes.Slices`
    channels: str = ""
    crop: int = 0
    plane: str = ""
    window: tuple = ()


def is_of_library(model: str) -> bool:
    """Returns whether a model, such as "ResNet18:width=16", belongs to this library."""
    return split_choice(model, _MODELS)[0] in _MODELS


def write_served(
    folder: Path, about: About, variables: Variables, programs: Mapping[str, Program]
) -> None:
    """Writes a served model atomically, with adaptation -> program; raises as `new_folder`."""
    with new_folder(folder, "--export") as partial:
        np.savez(partial / _VARIABLES, **to_named(variables))
        (partial / _PROGRAMS).mkdir()
        written = {
            adaptation: write_program(partial / _PROGRAMS, adaptation, program)
            for adaptation, program in programs.items()
        }
        content = about._replace(programs=written)._asdict()
        (partial / _ABOUT).write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def new_folder(folder: Path, flag: str) -> Iterator[Path]:
    """Yields an empty folder, which becomes `folder` at the end unless an error is raised.

    Raises:
      ValueError: `folder`, which `flag` named, is not empty, or is a file.
      OSError: it cannot be written.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not empty: give another {flag}, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)  # `mkdtemp` makes folders that only their owner can read
        os.replace(partial, folder)  # atomic, because both are on one file system
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(
    folder: str | Path, adapt: str = "", batch_size: int | None = None, trust: bool = False
) -> Predictor:
    """Returns a predictor of a served model; it needs no training code, data or network.

    Args:
      folder: the folder that `fedjax-bn serve --export` wrote.
      adapt: the adaptation, `name:key=value`; empty: the first with which the run tested unseen
        clients. A model that is not this library's has only the adaptations that were served.
      batch_size: B, unless `adapt` sets it; None: the run's batch size in tests. The programs of a
        model that is not this library's have a fixed B.
      trust: whether to run the compiled program of a model or adaptation that is not this
        library's. A program is code: it can crash, never end, or exploit a fault of XLA.

    Raises:
      ValueError: the folder holds no served model or a damaged one, `adapt` is unknown, or its
        program is needed without `trust`.
    """
    folder = Path(folder)
    about = read_about(folder)
    # A user's own adaptation is imported only if the user gave its name, never by the folder's.
    named_by_user, adapt = bool(adapt), adapt or about.adaptations[0]
    with damage_named(folder / _VARIABLES), (folder / _VARIABLES).open("rb") as file:
        arrays = dict(np.load(file))
    name = split_choice(adapt, ADAPTATIONS)[0]
    if not is_of_library(about.model) or not (named_by_user or name in ADAPTATIONS):
        _require_trusted_program(folder, about, adapt, trust)
        program = about.programs[adapt]
        return open_program(folder / _PROGRAMS, adapt, program, arrays, _check_of(about))
    if name == "ensemble":
        raise ValueError(
            "--adapt ensemble needs the batch norms of every client, which a served model does not "
            "hold: choose another adaptation"
        )
    title = f"the served model {about.model}"
    make, fields = read_choice(title, about.model, _MODELS, given=_SET_HERE)
    model = call_chosen(title, make, num_classes=len(about.classes), **fields)
    if about.compute_dtype != "float32":
        model = in_dtype(model, about.compute_dtype)
    variables = _variables_of(folder, about, model, arrays)
    choice = choose_adaptation(adapt, model, batch_size or about.batch_size)
    prepare = standardize(about.mean, about.std)
    return from_choice(choice, variables, prepare, _check_of(about))


def _require_trusted_program(folder: Path, about: About, adapt: str, trust: bool) -> None:
    """Raises ValueError unless the program of an adaptation was served, and its user trusts it."""
    # Code that only the folder names is never imported; only its program is used.
    if adapt not in about.programs:
        raise ValueError(
            f"--adapt {adapt!r} was not served with {folder}, which names code that is "
            f"not of this library{nearest(adapt, about.programs)}"
        )
    if not trust:
        foreign = adapt if is_of_library(about.model) else about.model
        raise ValueError(
            f"{foreign!r} of {folder} is not of this library and needs the folder's compiled "
            "program, which is code that may come from anybody: if you trust it, add --trust (in "
            "Python trust=True); or choose an --adapt of this library"
        )


def _check_of(about: About) -> Callable[[np.ndarray], None]:
    """Returns `check(images)`, which raises ValueError for another form than that of training."""

    def check(images: np.ndarray) -> None:
        form = str(images.dtype), list(images.shape[1:])
        if form != (about.dtype, about.shape):
            raise ValueError(
                f"images are {form[0]} {form[1]}, but the model was trained on {about.dtype} "
                f"{about.shape}: give images of that form (--resize stretches bytes to it)"
            )

    return check


def read_about(folder: Path) -> About:
    """Returns the content of model.json, or raises ValueError if it is missing or damaged."""
    path = folder / _ABOUT
    with damage_named(path):
        about = About(**json.loads(path.read_text()))
        if about.form != FORM:
            raise ValueError(f"it is of form {about.form}, and this version reads form {FORM}")
    return about


def _variables_of(
    folder: Path, about: About, model: Any, arrays: Mapping[str, np.ndarray]
) -> Variables:
    """Returns the arrays as collections: the model's, checked, and those that a method adds."""
    images = jax.ShapeDtypeStruct((2, *about.shape), jnp.float32)
    with naming(f"the model {about.model} for samples {about.shape} of {folder}"):
        leaves = flatten_dict(jax.eval_shape(model.init, jax.random.key(0), images), sep="/")
    for name, leaf in leaves.items():
        array = arrays.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ValueError(
                f"{folder / _VARIABLES} holds no {name} as {about.model} has it: serve it again"
            )
    collections = {name.partition("/")[0] for name in leaves}
    if any(name.partition("/")[0] not in collections for name in arrays):
        # A collection that a method has added may need a hook, which `contrib` registers. A model
        # alone is served without training code.
        import fedjax_bn.contrib  # noqa: F401
    return jax.tree.map(jnp.asarray, unflatten_dict(dict(arrays), sep="/"))
