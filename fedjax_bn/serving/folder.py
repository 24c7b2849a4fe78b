"""Writes and reads a served model's folder, for `fedjax-bn serve`, `fedjax-bn predict` and `load`.

    model.json      the model's name and options, its classes, the form of its samples, how bytes
                    are standardized, the adaptations with which it was tested
    variables.npz   its arrays, COLLECTION/MODULE/NAME; in a name % is %25 and / is %2F
    programs/       each adaptation as a StableHLO program, which JAX runs without this library

Nothing that a folder names is imported. A program is code: that of a model or adaptation that is
not this library's runs only if the user trusts the folder. It makes no custom call, because JAX
checks neither the function that such a call names nor the sizes of its arrays.

    import numpy as np
    from jax import export

    program = export.deserialize(bytearray(open("programs/tsmobn.stablehlo", "rb").read()))
    arrays = dict(np.load("variables.npz"))
    carry = dict(np.load("programs/tsmobn.npz"))           # before a client's first batch
    probabilities, carry = program.call(arrays, carry, images, valid)   # batch after batch

Images [B, ...] have the stored form (the program standardizes bytes), with B from model.json;
valid bool[B] is False after the last image of a short batch. Probabilities are f[B, classes], or
f[B, H, W, classes] of pixels where model.json has `masks`. Programs are for CPU, and for versions
of JAX up to six months later than the one that wrote them (`exported` in model.json).
"""

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from fedjax_bn import __version__, models
from fedjax_bn.adaptation.choice import ADAPTATIONS, Choice, choose_adaptation
from fedjax_bn.arguments.choices import call_chosen, naming, read_choice, split_choice
from fedjax_bn.arguments.text import file_name
from fedjax_bn.engine.images import standardize
from fedjax_bn.engine.named_arrays import from_named, names_of, to_named, tree_of
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.serving.predictor import Predictor
from fedjax_bn.sharing import Variables

PyTree = Any
FORM = 1  # the version of the folder's format

_ABOUT, _VARIABLES, _PROGRAMS = "model.json", "variables.npz", "programs"
_MODELS = {name: getattr(models, name) for name in models.__all__}
# For so long JAX promises to run a program of `jax.export`, see "Compatibility guarantees" there.
_GUARANTEE = timedelta(days=180)
_AGAIN = "serve the model again from its run, by `fedjax-bn serve --workdir RUN --export NEW`"


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
    programs: dict  # adaptation -> {"batch_size": B, "order": of the images, see `Choice`}
    batch_size: int  # B of tests with adaptations that set no other
    orientation: str  # "upright" or "stored", see `pixels.decode`
    masks: str  # how images of another size reach a model that segments: "resize" or "tiles"
    client: str = ""  # whose own model it is; "" for the one that an unseen client receives
    # how slices of scans become samples, see `data.masks.volumes.Slices`
    channels: str = ""
    crop: int = 0
    plane: str = ""
    window: tuple = ()
    # how the programs were written: {"jax": version, "calling_convention": number, "date": day,
    # "until": day}; the promise to run them ends after the last, see `expiry`
    exported: dict = {}  # noqa: RUF012

    @property
    def is_of_library(self) -> bool:
        """Whether the model belongs to this library."""
        return split_choice(self.model, _MODELS)[0] in _MODELS

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Returns the content of a folder's model.json; ValueError if missing or damaged."""
        path = folder / _ABOUT
        with _damage_named(path):
            about = cls(**json.loads(path.read_text()))
            if about.form != FORM:
                raise ValueError(f"form {about.form}, and this version reads form {FORM}")
        return about


def expiry(folder: Path, about: About, today: date | None = None) -> str:
    """Returns what to do if JAX no longer promises to run a folder's programs; "" if it does."""
    exported = about.exported
    if not exported or (today or date.today()) <= date.fromisoformat(exported["until"]):
        return ""
    return (
        f"the programs of {folder} are of JAX {exported['jax']} and {exported['date']}, and the "
        f"promise that later versions (here {jax.__version__}) run them ended on "
        f"{exported['until']}: {_remedy(folder, about)}"
    )


def _renewable(about: About) -> bool:
    """Returns whether this library has the code of the model and its adaptations."""
    names = {split_choice(text, ADAPTATIONS)[0] for text in about.programs or about.adaptations}
    return about.is_of_library and names <= {*ADAPTATIONS}


def _remedy(folder: Path, about: About) -> str:
    return f"write them anew by `fedjax-bn serve --renew {folder}`" if _renewable(about) else _AGAIN


def write_served(
    folder: Path, about: About, variables: Variables, choices: Mapping[str, Choice]
) -> None:
    """Writes a served model atomically, with each adaptation by its text, also as a program.

    Raises ImportError without flatbuffers, which `jax.export` needs, and ValueError as `new_folder`
    or if a program makes a custom call.
    """
    with new_folder(folder, "--export") as unfinished:
        np.savez(unfinished / _VARIABLES, **to_named(variables))
        (unfinished / _PROGRAMS).mkdir()
        programs, exported, today = {}, {}, date.today()
        for text, choice in choices.items():
            program, carry = _exported(choice, variables, about)
            path = _program_path(unfinished, text)
            path.write_bytes(program.serialize())
            np.savez(path.with_suffix(".npz"), **carry)
            programs[text] = {"batch_size": choice.batch_size, "order": choice.order}
            exported = {
                "jax": jax.__version__,
                "calling_convention": program.calling_convention_version,
                "date": today.isoformat(),
                "until": (today + _GUARANTEE).isoformat(),
            }
        content = about._replace(programs=programs, exported=exported)._asdict()
        (unfinished / _ABOUT).write_text(json.dumps(content, indent=2) + "\n")


def renew(folder: Path) -> list[str]:
    """Writes the programs of a served model anew, from its arrays and this library's code.

    It runs the old ones, to compare. Each file is replaced as a whole, and model.json, which has
    the dates, comes last; other files stay. Returns the adaptations whose old programs cannot run.

    Raises ValueError, and writes nothing, if a new program disagrees with an old one, the folder is
    damaged, or its model or an adaptation is not this library's.
    """
    folder, incomparable = folder.resolve(), []
    about = About.read(folder)
    if not _renewable(about):
        raise ValueError(f"{folder} lacks the code of a model or adaptation of its own: {_AGAIN}")
    model, arrays = _model_of(about), _arrays_in(folder)
    variables = _variables_of(folder, about, model, arrays)
    texts = about.programs or about.adaptations
    choices = {text: choose_adaptation(text, model, about.batch_size) for text in texts}
    # Of probabilities; half precision rounds at about 0.004.
    tolerance = 1e-3 if about.compute_dtype == "float32" else 3e-2
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        fresh = Path(place) / folder.name
        write_served(fresh, about._replace(library=__version__), variables, choices)
        for text in texts:
            try:
                expected = _trial(folder, text, arrays)
            except Exception:  # of any kind, as a later XLA may refuse a program
                incomparable.append(text)
                continue
            if not np.allclose(_trial(fresh, text, arrays), expected, atol=tolerance):
                fault = f"the new program of {text} in {folder} disagrees with the old one"
                raise ValueError(f"{fault}, which stays: {_AGAIN}")
        (folder / _PROGRAMS).mkdir(exist_ok=True)
        for path in (*(fresh / _PROGRAMS).iterdir(), fresh / _ABOUT):
            os.replace(path, folder / path.relative_to(fresh))
    return incomparable


def _trial(folder: Path, text: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the probabilities of two batches of random images by a program of a folder."""
    program, carry = _program_in(folder, text)
    images, valid = (np.zeros(x.shape, x.dtype) for x in program.in_avals[-2:])
    random, results = np.random.default_rng(0), []
    for _ in range(2):
        batch = random.uniform(0, 256, images.shape).astype(images.dtype)
        probabilities, carry = program.call(arrays, carry, batch, ~valid)
        results.append(np.asarray(probabilities))
    return np.stack(results)


def _program_path(folder: Path, text: str) -> Path:
    return folder / _PROGRAMS / f"{file_name(text)}.stablehlo"


def _program_in(folder: Path, text: str) -> tuple[jax_export.Exported, dict[str, np.ndarray]]:
    """Returns an adaptation's program in a folder, and its carry before the first batch."""
    path = _program_path(folder, text)
    with path.with_suffix(".npz").open("rb") as file:
        start = dict(np.load(file))
    program = jax_export.deserialize(bytearray(path.read_bytes()))
    _refuse_custom_calls(program)
    return program, start


def _exported(
    choice: Choice, variables: Variables, about: About
) -> tuple[jax_export.Exported, dict[str, np.ndarray]]:
    """Returns an adaptation as a program over named arrays, and its first carry by name."""
    step = Predictor.by_choice(choice, variables, standardize(about.mean, about.std)).step
    start = choice.adaptation.init(variables)

    def run(arrays: Any, carry: Any, images: jax.Array, valid: jax.Array) -> tuple:
        variables = tree_of(arrays)
        leaves, form = jax.tree.flatten(start)
        leaves = [
            jax.random.wrap_key_data(carry[str(i)]) if _is_key(x) else carry[str(i)]
            for i, x in enumerate(leaves)
        ]
        probabilities, after = step(variables, jax.tree.unflatten(form, leaves), images, valid)
        return probabilities, _numbered(after)

    arrays, carry = to_named(variables), _numbered(start)
    images = jax.ShapeDtypeStruct((choice.batch_size, *about.shape), about.dtype)
    valid = jax.ShapeDtypeStruct((choice.batch_size,), bool)
    program = jax_export.export(jax.jit(run), platforms=("cpu",))(arrays, carry, images, valid)
    _refuse_custom_calls(program)
    return program, {name: np.asarray(leaf) for name, leaf in carry.items()}


def _refuse_custom_calls(program: jax_export.Exported) -> None:
    if call := re.search(r"\.custom_call\b([^(]{0,80})", program.mlir_module()):
        raise ValueError(f"a program may make no custom call{call[1]}, as linear algebra does")


def _numbered(carry: PyTree) -> dict[str, Any]:
    """Returns the leaves of a carry by their number, with random keys as their raw words."""
    # An .npz cannot hold key arrays, and callers of a program need no tree of this library.
    leaves = enumerate(jax.tree.leaves(carry))
    return {str(i): jax.random.key_data(x) if _is_key(x) else x for i, x in leaves}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@contextmanager
def new_folder(folder: Path, flag: str) -> Iterator[Path]:
    """Yields an empty folder, which becomes `folder` at the end unless an error is raised.

    Raises ValueError if `folder`, which `flag` named, is not empty, or is a file.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not empty: give another {flag}, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)  # `mkdtemp` makes folders that only their owner can read
        os.replace(unfinished, folder)  # atomic, because both are on one file system
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load(
    folder: str | Path,
    adapt: str = "",
    batch_size: int | None = None,
    trust: bool = False,
    today: date | None = None,
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
      today: for the warning that JAX no longer promises to run the folder's programs.

    Raises ValueError if the folder is damaged, `adapt` unknown, or `trust` missing.
    """
    folder = Path(folder)
    about = About.read(folder)
    # A user's own adaptation is imported only if the user gave its name, never by the folder's.
    named_by_user, adapt = bool(adapt), adapt or about.adaptations[0]
    arrays = _arrays_in(folder)
    with _damage_named(folder / _ABOUT, _remedy(folder, about)):
        note = expiry(folder, about, today)
    if note:
        warnings.warn(note, stacklevel=2)
    name = split_choice(adapt, ADAPTATIONS)[0]
    check = partial(_check_form, about)
    if not about.is_of_library or not (named_by_user or name in ADAPTATIONS):
        # Code that only the folder names is never imported; only its program is used.
        if adapt not in about.programs or not trust:
            code = f"{about.model!r} with --adapt {adapt!r} is not of this library"
            needs = f"--trust and a program of {folder}, which is code"
            served = ", ".join(about.programs)
            raise ValueError(f"{code}: it needs {needs}; served are {served}")
        facts = about.programs[adapt]
        with _damage_named(_program_path(folder, adapt), note or _remedy(folder, about)):
            program, start = _program_in(folder, adapt)
        step, batch_size, order = jax.jit(program.call), facts["batch_size"], facts["order"]
        return Predictor(arrays, lambda: start, step, check, batch_size, order)
    model = _model_of(about)
    variables = _variables_of(folder, about, model, arrays)
    choice = choose_adaptation(adapt, model, batch_size or about.batch_size)
    return Predictor.by_choice(choice, variables, standardize(about.mean, about.std), check)


def _model_of(about: About) -> Any:
    """Returns the model of this library that model.json names."""
    title = f"the served model {about.model}"
    make, fields = read_choice(title, about.model, _MODELS, given=("num_classes", "name", "parent"))
    model = call_chosen(title, make, num_classes=len(about.classes), **fields)
    return model if about.compute_dtype == "float32" else in_dtype(model, about.compute_dtype)


def _arrays_in(folder: Path) -> dict[str, np.ndarray]:
    with _damage_named(folder / _VARIABLES), (folder / _VARIABLES).open("rb") as file:
        return dict(np.load(file))


@contextmanager
def _damage_named(path: Path | str, remedy: str = "serve the model again") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # flatbuffers and NumPy raise any error on damaged files
        raise ValueError(f"cannot read {path} ({error}): {remedy}") from error


def _check_form(about: About, images: np.ndarray) -> None:
    form = str(images.dtype), list(images.shape[1:])
    if form != (about.dtype, about.shape):
        expected = f"{about.dtype} {about.shape}, to which --resize stretches bytes"
        raise ValueError(f"images are {form[0]} {form[1]}, but the model takes {expected}")


def _variables_of(
    folder: Path, about: About, model: Any, arrays: Mapping[str, np.ndarray]
) -> Variables:
    """Returns the arrays as collections: the model's, checked, and those that a method adds."""
    images = jax.ShapeDtypeStruct((2, *about.shape), jnp.float32)
    with naming(f"the model {about.model} for samples {about.shape} of {folder}"):
        expected = jax.eval_shape(model.init, jax.random.key(0), images)
    with _damage_named(f"{folder / _VARIABLES} of {about.model}"):
        from_named({name: arrays[name] for name in arrays.keys() & names_of(expected)}, expected)
        variables = tree_of(arrays)
    if variables.keys() - expected.keys():
        # A collection that a method has added may need a hook, which `contrib` registers. A model
        # alone is served without training code.
        import fedjax_bn.contrib  # noqa: F401
    return jax.tree.map(jnp.asarray, variables)
