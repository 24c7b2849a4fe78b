"""What a client receives, as a folder: `fedjax-bn serve` writes it, `predict` and `load` read it.

    model.json      what the model is: its spelling, classes, the form of its samples, how bytes are
                    standardized, the adaptations it was tested with
    variables.npz   its arrays, COLLECTION/MODULE/NAME
    programs/       each adaptation as StableHLO, see `serving.program`

Nothing in it is executed but programs of StableHLO, and a model is built only of this library's
own: so a folder from elsewhere runs no code of elsewhere.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_bn import models
from fedjax_bn.adaptation.choice import ADAPTATIONS, choose_adaptation
from fedjax_bn.data.pixels.images import standardize
from fedjax_bn.data.pixels.orientation import ORIENTATIONS, STORED
from fedjax_bn.data.sets.arrays import names_in_npz, read_npz
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.named_arrays import to_named
from fedjax_bn.ranges import brief, nearest
from fedjax_bn.serving.predictor import Predictor, from_choice
from fedjax_bn.serving.program import Program, open_program, write_program
from fedjax_bn.sharing import Variables
from fedjax_bn.spelling import call_chosen, read_choice, split_choice

FORM = 1  # of the folder
ABOUT, VARIABLES, PROGRAMS = "model.json", "variables.npz", "programs"
_MODELS = {name: getattr(models, name) for name in models.__all__}
_GIVEN = ("num_classes", "name", "parent")


class About(NamedTuple):
    """What model.json says.

    Attributes:
      form: the number of the folder's form.
      library: the version of fedjax_bn that wrote it.
      model: its spelling, such as "ResNet18:width=16".
      compute_dtype: in which its layers compute.
      method, dataset, round: what trained it, on what, for how many rounds.
      classes: their names, in the order of the probabilities.
      shape, dtype: of one stored sample.
      mean, std: bytes reach the model as (u8/255 - mean)/std.
      adaptations: those with which its run tested unseen clients.
      programs: adaptation -> what `open_program` needs.
      batch_size: B of the batches on which its run tested them, where they spell no other.
      orientation: of the image files that trained it, see `pixels.orientation`; a folder of an
        earlier version, which has no such entry, was trained on stored pixels.
    """

    form: int
    library: str
    model: str
    compute_dtype: str
    method: str
    dataset: str
    round: int
    classes: list
    shape: list
    dtype: str
    mean: list
    std: list
    adaptations: list
    programs: dict
    batch_size: int = 32
    orientation: str = STORED


def is_ours(spelled: str) -> bool:
    """Whether a model's spelling names one of this library, which any reader can build."""
    return split_choice(spelled, _MODELS)[0] in _MODELS


def write(
    folder: Path, about: About, variables: Variables, programs: Mapping[str, Program]
) -> None:
    """Writes a served model; all of it is there at once, or nothing.

    Args:
      folder: one that is not there yet, or empty.
      about: what it is, `programs` aside.
      variables: its collections, dicts in dicts of arrays.
      programs: adaptation -> its program.

    Raises:
      ValueError: the folder holds something.
      OSError: it cannot be written.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not empty: give another --export, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        np.savez(partial / VARIABLES, **to_named(variables))
        (partial / PROGRAMS).mkdir()
        written = {
            text: write_program(partial / PROGRAMS, text, program)
            for text, program in programs.items()
        }
        content = about._replace(programs=written)._asdict()
        (partial / ABOUT).write_text(json.dumps(content, indent=2) + "\n")
        partial.chmod(0o755)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(folder: str | Path, adapt: str = "", batch_size: int | None = None) -> Predictor:
    """What predicts with a served model; no training code, data or network is needed.

    Args:
      folder: as `fedjax-bn serve --export` wrote it.
      adapt: how it predicts, `name:key=value`; empty: the first with which its run tested unseen
        clients. Of a model that is not this library's, one of those that were served.
      batch_size: B, where `adapt` spells none; None: that on which the run tested. A model that is
        not this library's has the one of its program.

    Raises:
      ValueError: the folder holds no served model or a damaged one, or `adapt` is unknown.
    """
    folder = Path(folder)
    about = read_about(folder)
    adapt = adapt or about.adaptations[0]
    named = _read_arrays(folder / VARIABLES)
    check = _form_check(about)
    if not is_ours(about.model):
        if adapt not in about.programs:
            raise ValueError(
                f"--adapt {brief(adapt)} is none of those served with {folder}, whose model "
                f"{brief(about.model)} is not of this library{nearest(adapt, about.programs)}"
            )
        return open_program(folder / PROGRAMS, adapt, about.programs[adapt], named, check)
    if split_choice(adapt, ADAPTATIONS)[0] == "ensemble":
        raise ValueError(
            "--adapt ensemble needs the batch norms of every client, which a served model does not "
            "hold: choose another adaptation"
        )
    model = _build(about)
    variables = jax.tree.map(jnp.asarray, unflatten_dict(named, sep="/"))
    _check_variables(folder, about, model, variables)
    choice = choose_adaptation(adapt, model, batch_size or about.batch_size)
    return from_choice(choice, variables, standardize(about.mean, about.std), check)


def read_about(folder: Path) -> About:
    """The content of model.json.

    Raises:
      ValueError: the folder holds no served model, or one that was edited or damaged.
    """
    path = folder / ABOUT
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no served model ({ABOUT} is not there): give a folder that "
            "`fedjax-bn serve --export` has written"
        )
    try:
        content = json.loads(path.read_text())
        about = About(**content)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot read {path} ({brief(str(error))}): serve it again") from error
    if wrong := _fault(about):
        raise ValueError(f"cannot read {path} ({wrong}): serve it again")
    return about


def _fault(about: About) -> str:
    """What is wrong with the content of model.json; empty where nothing is."""
    kinds = About.__annotations__
    for name, value in about._asdict().items():
        if type(value) is not kinds[name]:
            return f"{name} must be of type {kinds[name].__name__}"
    if about.form != FORM:
        return f"it is of form {about.form}, and this version reads form {FORM}"
    texts = (*about.classes, *about.adaptations, *about.programs)
    if not all(type(text) is str for text in texts):
        return "its classes, adaptations and programs must have names"
    sides, numbers = about.shape, (*about.mean, *about.std)
    wrong = {
        "classes": not about.classes or len(set(about.classes)) < len(about.classes),
        "adaptations": not about.adaptations,
        "shape": not sides
        or not all(type(side) is int and side > 0 for side in sides)
        or math.prod(sides) > 2**28,
        "batch_size": about.batch_size < 1,
        "orientation": about.orientation not in ORIENTATIONS,
        "dtype": about.dtype not in ("uint8", "float32"),
        "mean or std": not all(type(number) is float for number in numbers)
        or not {len(about.mean), len(about.std)} <= {1, sides[-1]}
        or not all(about.std),
    }
    return next((f"its {name} cannot be" for name, is_wrong in wrong.items() if is_wrong), "")


def _build(about: About) -> Any:
    """The model of this library that model.json names."""
    what = f"the served model {brief(about.model)}"
    make, fields = read_choice(what, about.model, _MODELS, given=_GIVEN)
    model = call_chosen(what, make, num_classes=len(about.classes), **fields)
    return model if about.compute_dtype == "float32" else in_dtype(model, about.compute_dtype)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a `.npz` by name.

    Raises:
      ValueError: it is not there, or damaged.
    """
    try:
        return read_npz(path, names_in_npz(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path} ({brief(str(error))}): serve it again") from error


def _check_variables(folder: Path, about: About, model: Any, variables: Variables) -> None:
    """Raises ValueError unless the arrays are the model's, and perhaps what a method adds."""
    images = jax.ShapeDtypeStruct((2, *about.shape), jnp.float32)
    wanted = flatten_dict(jax.eval_shape(model.init, jax.random.key(0), images), sep="/")
    given = flatten_dict(variables, sep="/")
    wrong = [
        name
        for name, leaf in wanted.items()
        if name not in given or given[name].shape != leaf.shape
    ]
    if wrong:
        raise ValueError(
            f"{folder / VARIABLES} holds no {wrong[0]} as {about.model} has it: serve it again"
        )


def _form_check(about: About) -> Any:
    """Returns `check(images)`, which refuses samples of another form than the model's."""

    def check(images: np.ndarray) -> None:
        given, needed = (str(images.dtype), list(images.shape[1:])), (about.dtype, about.shape)
        if given != needed:
            raise ValueError(
                f"images are {given[0]} {given[1]}, but the model was trained on {needed[0]} "
                f"{needed[1]}: give images of that form (--resize stretches bytes to it)"
            )

    return check
