"""Writes and reads a served model's folder, for `fedjax-bn serve`, `fedjax-bn predict` and `load`.

    model.json      the model's name and options, its classes, the form of its samples, how bytes
                    are standardized, the adaptations with which it was tested
    variables.npz   its arrays, COLLECTION/MODULE/NAME
    programs/       each adaptation as StableHLO, see `serving.program`

Only the StableHLO programs of a folder are executed, and they can only compute. Models and
adaptations that a folder names are built only if they belong to this library, so a foreign folder
imports no code.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
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
from fedjax_bn.arguments.ranges import GREYS, ORDER, SAMPLES
from fedjax_bn.arguments.text import brief, nearest, one_line
from fedjax_bn.data.masks.assemble import RESIZE, TILES
from fedjax_bn.data.masks.volumes import AXIAL, CHANNELS, PLANES
from fedjax_bn.data.pixels.raster import ORIENTATIONS, STORED
from fedjax_bn.data.regular_files import read_regular
from fedjax_bn.data.sets.arrays import check_memory
from fedjax_bn.engine.images import impossible_samples, standardize
from fedjax_bn.engine.named_arrays import to_named
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.serving.predictor import Predictor, from_choice
from fedjax_bn.serving.program import Program, open_program, read_served, write_program
from fedjax_bn.sharing import Variables

FORM = 1  # the version of the folder's format

_ABOUT, _VARIABLES, _PROGRAMS = "model.json", "variables.npz", "programs"
_MODELS = {name: getattr(models, name) for name in models.__all__}
_MOST_ABOUT = 2**26  # bytes of model.json
_GIVEN = ("num_classes", "name", "parent")


class About(NamedTuple):
    """The content of model.json.

    Attributes:
      form: the version of the folder's format.
      library: the version of fedjax_bn that wrote the folder.
      model: the model's name and options, such as "ResNet18:width=16".
      compute_dtype: the dtype in which the layers compute.
      method, dataset, round: the method and data set of the training, and the number of rounds.
      classes: the class names, in the order of the probabilities.
      shape, dtype: the form of one stored sample.
      mean, std: bytes reach the model as (u8/255 - mean)/std.
      adaptations: the adaptations with which the run tested unseen clients.
      programs: adaptation -> the argument `about` of `open_program`.
      batch_size: B, the batch size of tests with adaptations that set no other.
      orientation: whether image files were turned upright for training, or used as stored, see
        `pixels.raster`; folders of earlier versions have no such entry and used stored pixels.
      masks: how images of another size reach a model that segments, "resize" or "tiles", see
        `data.large`; "" for a model that gives each sample one class, as in earlier versions.
      channels, crop, plane, window: how slices of scans become samples, see
        `data.masks.volumes.Slices`; `channels` is "" for a model of other images.
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
    masks: str = ""
    channels: str = ""
    crop: int = 0
    plane: str = AXIAL
    window: list = []  # noqa: RUF012, nothing changes it


def is_ours(model: str) -> bool:
    """Returns whether a model, such as "ResNet18:width=16", belongs to this library."""
    return split_choice(model, _MODELS)[0] in _MODELS


def write(
    folder: Path, about: About, variables: Variables, programs: Mapping[str, Program]
) -> None:
    """Writes a served model atomically.

    Args:
      folder: a folder that does not exist yet, or is empty.
      about: the content of model.json, without `programs`.
      variables: the model's collections, nested dicts of arrays.
      programs: adaptation -> its program.

    Raises:
      ValueError: the folder is not empty, or is a file.
      OSError: the folder cannot be written.
    """
    with new_folder(folder, "--export") as partial:
        np.savez(partial / _VARIABLES, **to_named(variables))
        (partial / _PROGRAMS).mkdir()
        written = {
            text: write_program(partial / _PROGRAMS, text, program)
            for text, program in programs.items()
        }
        content = about._replace(programs=written)._asdict()
        (partial / _ABOUT).write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def new_folder(folder: Path, flag: str) -> Iterator[Path]:
    """Yields an empty folder, which becomes `folder` at the end unless an error is raised.

    Args:
      folder: a folder that does not exist yet, or is empty.
      flag: what named it, for the error.

    Raises:
      ValueError: the folder is not empty, or is a file.
      OSError: the folder cannot be written.
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


def load(folder: str | Path, adapt: str = "", batch_size: int | None = None) -> Predictor:
    """Returns a predictor of a served model; it needs no training code, data or network.

    Args:
      folder: the folder that `fedjax-bn serve --export` wrote.
      adapt: the adaptation, `name:key=value`; empty: the first with which the run tested unseen
        clients. A model that is not this library's has only the adaptations that were served.
      batch_size: B, unless `adapt` sets it; None: the run's batch size in tests. The programs of a
        model that is not this library's have a fixed B.

    Raises:
      ValueError: the folder holds no served model or a damaged one, or `adapt` is unknown.
    """
    folder = Path(folder)
    about = read_about(folder)
    # A user's own adaptation is imported only if the user gave its name, never by the folder's.
    typed, adapt = bool(adapt), adapt or about.adaptations[0]
    try:
        named = read_served(folder / _VARIABLES)
    except (OSError, ValueError) as error:
        reason = brief(str(error))
        raise ValueError(f"cannot read {folder / _VARIABLES} ({reason}): serve it again") from error

    def check(images: np.ndarray) -> None:
        given, needed = (str(images.dtype), list(images.shape[1:])), (about.dtype, about.shape)
        if given != needed:
            raise ValueError(
                f"images are {given[0]} {given[1]}, but the model was trained on {needed[0]} "
                f"{needed[1]}: give images of that form (--resize stretches bytes to it)"
            )

    name = split_choice(adapt, ADAPTATIONS)[0]
    if not is_ours(about.model) or not (typed or name in ADAPTATIONS):
        # Code that only the folder names is never imported; only its program is used.
        if adapt not in about.programs:
            raise ValueError(
                f"--adapt {brief(adapt)} was not served with {folder}, which names code that is "
                f"not of this library{nearest(adapt, about.programs)}"
            )
        program = about.programs[adapt]
        predictor = open_program(folder / _PROGRAMS, adapt, program, named, check)
    elif name == "ensemble":
        raise ValueError(
            "--adapt ensemble needs the batch norms of every client, which a served model does not "
            "hold: choose another adaptation"
        )
    else:
        what = f"the served model {brief(about.model)}"
        make, fields = read_choice(what, about.model, _MODELS, given=_GIVEN)
        model = call_chosen(what, make, num_classes=len(about.classes), **fields)
        if about.compute_dtype != "float32":
            model = in_dtype(model, about.compute_dtype)
        variables = _variables_of(folder, about, model, named)
        choice = choose_adaptation(adapt, model, batch_size or about.batch_size)
        predictor = from_choice(choice, variables, standardize(about.mean, about.std), check)
    _check_traced(folder, adapt, about, predictor)
    return predictor


def read_about(folder: Path) -> About:
    """Returns the content of model.json.

    Raises:
      ValueError: the folder holds no served model, or one that was edited or damaged.
    """
    path = folder / _ABOUT
    if not path.exists():
        raise ValueError(
            f"{folder} holds no served model ({_ABOUT} is not there): give a folder that "
            "`fedjax-bn serve --export` has written"
        )
    try:
        about = About(**json.loads(read_regular(path, _MOST_ABOUT)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot read {path} ({brief(str(error))}): serve it again") from error
    if wrong := _fault(about):
        raise ValueError(f"cannot read {path} ({wrong}): serve it again")
    return about


def _fault(about: About) -> str:
    """Returns what is wrong with the content of model.json; "" if nothing is."""
    parts = {"classes": str, "adaptations": str, "programs": str, "shape": int}
    parts |= {"mean": float, "std": float, "window": float}
    for name, kind in About.__annotations__.items():
        value = getattr(about, name)
        if type(value) is not kind:
            return f"{name} must be of type {kind.__name__}"
        if name in parts and not all(type(one) is parts[name] for one in value):
            return f"its {name} must each be of type {parts[name].__name__}"
    if about.form != FORM:
        return f"it is of form {about.form}, and this version reads form {FORM}"
    allowed = {"batch_size": SAMPLES, "order": ORDER}

    def is_program(entry: Any) -> bool:
        known = isinstance(entry, dict) and entry.keys() == allowed.keys()
        return known and all(type(x) is int and allowed[k].holds(x) for k, x in entry.items())

    wrong = {
        "classes": not about.classes or len(set(about.classes)) < len(about.classes),
        "adaptations": not about.adaptations,
        "compute_dtype": about.compute_dtype not in ("float32", "bfloat16"),
        "batch_size": not SAMPLES.holds(about.batch_size),
        "orientation": about.orientation not in ORIENTATIONS,
        "masks": about.masks not in ("", RESIZE, TILES)
        or (bool(about.masks) and len(about.shape) != 3),
        "channels": about.channels not in ("", *(CHANNELS if about.masks else ())),
        "crop": not 0 <= about.crop < 2**31,
        "plane": about.plane not in PLANES,
        "window": not GREYS.holds(about.window),
        "programs": not all(map(is_program, about.programs.values())),
    }
    impossible = impossible_samples(about.shape, about.dtype, about.mean, about.std)
    what = next((name for name, is_wrong in wrong.items() if is_wrong), impossible)
    return f"its {what} cannot be" if what else ""


def _variables_of(
    folder: Path, about: About, model: Any, named: Mapping[str, np.ndarray]
) -> Variables:
    """Returns the arrays as collections: the model's, and those that a method adds.

    Raises:
      ValueError: an array of the model is missing, or has another shape or dtype.
    """
    images = jax.ShapeDtypeStruct((2, *about.shape), jnp.float32)
    with naming(f"the model {brief(about.model)} for samples {about.shape} of {folder}"):
        wanted = flatten_dict(jax.eval_shape(model.init, jax.random.key(0), images), sep="/")
    for name, leaf in wanted.items():
        array = named.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ValueError(
                f"{folder / _VARIABLES} holds no {name} as {about.model} has it: serve it again"
            )
    collections = {name.partition("/")[0] for name in wanted}
    if any(name.partition("/")[0] not in collections for name in named):
        # A collection that a method has added may need a hook, which `contrib` registers. A model
        # alone is served without training code.
        import fedjax_bn.contrib  # noqa: F401
    with naming(f"the tree of {folder / _VARIABLES}"):  # "a" and "a/b" cannot both be leaves
        return jax.tree.map(jnp.asarray, unflatten_dict(dict(named), sep="/"))


def _check_traced(folder: Path, adapt: str, about: About, predictor: Predictor) -> None:
    """Raises ValueError, before anything is compiled, unless a batch gives probabilities."""
    size = predictor.batch_size
    images = jax.ShapeDtypeStruct((size, *about.shape), about.dtype)
    try:
        check_memory(images.size * 4)
        carry = jax.eval_shape(predictor.start)
        valid = jax.ShapeDtypeStruct((size,), bool)
        found = jax.eval_shape(predictor.step, carry, images, valid)[0]
        pixels = tuple(about.shape[:2]) if about.masks else ()
        if found.shape != (size, *pixels, len(about.classes)) or found.dtype.kind != "f":
            raise ValueError(f"it gives {found.dtype}{list(found.shape)}, and no probabilities")
    except Exception as error:  # arrays of another form cause any error in a model or program
        raise ValueError(
            f"{folder} cannot predict by {brief(adapt)} in batches of {size} ({one_line(error)}): "
            "choose another --adapt, or serve it again"
        ) from error
