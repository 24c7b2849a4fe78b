"""Files from elsewhere: no code of theirs is imported, and every number of them is checked."""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export as jax_export

import runs
from fedjax_bn.adaptation import Adaptation
from fedjax_bn.adaptation.choice import ADAPTATIONS, Choice, choose_adaptation
from fedjax_bn.arguments.choices import read_choice
from fedjax_bn.models import MLP
from fedjax_bn.run.files import finished_run
from fedjax_bn.run.files.finished_run import recorded_code
from fedjax_bn.serving import folder as served_folder

CODE = """
from pathlib import Path

import fedjax_bn.methods
from fedjax_bn import aggregation, models, sharing
from fedjax_bn.adaptation import running

Path(__file__).with_name(f"{__name__}-ran").touch()
Net, method, share, adapt = models.MLP, fedjax_bn.methods.fedbn, sharing.everything, running
weigh = lambda: aggregation.by_size
"""
IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), np.uint8)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    return runs.finished(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture
def foreign(trained_run, tmp_path, request):
    """`foreign(KEY=VALUE)`: a workdir from elsewhere, whose folder holds code that it names."""
    module = f"code{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(CODE)

    def make(**keys):
        place = tmp_path / "hospital9"
        shutil.copytree(trained_run, place)
        about = json.loads((place / "config.json").read_text())
        keys = {
            k.replace("__", "."): json.loads(json.dumps(v).replace("CODE", module))
            for k, v in keys.items()
        }
        about["config"] |= keys
        about["started_in"] = str(tmp_path)
        (place / "config.json").write_text(json.dumps(about))
        return place

    yield make
    for name in [name for name in sys.modules if name.startswith(module)]:
        del sys.modules[name]


def ran(place):
    """Whether the code beside a workdir was imported."""
    return bool(list(place.parent.glob("*-ran")))


NAMED = {
    "model": {"model": "CODE:Net"},
    "method": {"method": "CODE:method"},
    "share": {"share": "CODE:share"},
    "weigh": {"weigh": "CODE:weigh"},
    "adaptations": {"adaptations": ["running", "CODE:adapt"]},
    "augment": {"data__augment": "CODE:method"},
    "perturb": {"data__perturb": "CODE:share"},
    "mixing": {"method": "fedig:mixing=CODE:share"},
}


@pytest.mark.parametrize(
    ("command", "key"), [("evaluate", "model"), *(("serve", key) for key in NAMED)]
)
def test_a_workdir_imports_no_code_that_only_it_names(
    foreign, monkeypatch, capfd, command, key, tmp_path
):
    place = foreign(**NAMED[key])
    monkeypatch.chdir(tmp_path)  # where the code lies
    before = ["", *sys.path]
    monkeypatch.setattr(sys, "path", list(before))
    option = "--config.target=dog" if command == "evaluate" else "--export=x"
    assert runs.command(command, f"--workdir={place}", option) == 2
    (line,) = capfd.readouterr().err.splitlines()
    for part in ("not imported", "hospital9 names it", f"{tmp_path}), add --trust"):
        assert part in line
    assert sys.path == before
    assert not ran(place)


@pytest.mark.parametrize("word", ["trust", "path", "typed"])
def test_code_runs_at_its_users_word(foreign, monkeypatch, tmp_path, word):
    place = foreign(**NAMED["adaptations"] if word == "typed" else NAMED["model"])
    (code,) = tmp_path.glob("code*.py")
    monkeypatch.setattr(sys, "path", list(sys.path))
    given = {"trust": "--trust", "typed": f"--config.adaptations={code.stem}:adapt,tsmobn"}
    if word != "trust":
        monkeypatch.syspath_prepend(tmp_path)
    if word == "path":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    served = tmp_path / "served"
    more = [given[word]] if word in given else []
    assert runs.command("serve", f"--workdir={place}", f"--export={served}", *more) == 0
    assert served.exists()
    assert ran(place)


@pytest.mark.parametrize("name", ["os:system", "this:s", "numpy:load", "setup:setup", "docs.x:x"])
def test_names_of_pythons_own_and_of_installed_packages_are_not_on_the_users_path(
    monkeypatch, name
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(runs.ROOT), np.__path__[0], ""]))
    sys.modules.pop("this", None)
    refused = pytest.raises(ValueError, match="not imported")
    with recorded_code(runs.ROOT, {}), refused:
        read_choice("it", name, ADAPTATIONS)
    assert "this" not in sys.modules


def test_compiled_programs_of_a_foreign_folder_are_not_run(foreign, tmp_path):
    about = finished_run.read_about(foreign(compilation_cache=str(tmp_path)))
    assert finished_run.remembered(about).compilation_cache == ""
    assert finished_run.remembered(about, trust=True).compilation_cache == str(tmp_path)


def test_predict_imports_nothing_from_the_folder_where_it_is_given(served, tmp_path):
    """Modules that are looked for when a model is read lie in it, under their names."""
    for name in ("evil", "torch", "flatbuffers", "tqdm", "zstandard", "scipy"):
        (served / f"{name}.py").write_text(f"open('{name}-ran', 'w')")
    edit(served, adaptations=["evil:f"])
    np.savez(tmp_path / "i.npz", images=IMAGES)
    given = ["predict", "--model=.", f"--data={tmp_path / 'i.npz'}"]
    paths = [str(runs.ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "fedjax_bn", *given],
        cwd=served,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    (line,) = done.stderr.splitlines()
    assert "'evil:f' is not of this library" in line
    assert not list(served.glob("*-ran"))


def edit(place, **changes):
    """Changes model.json."""
    about = json.loads((place / "model.json").read_text())
    (place / "model.json").write_text(json.dumps(about | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A served folder of an MLP on bytes, with one program."""
    model, shape = MLP(num_classes=3), (4, 4, 3)
    start = jax.jit(lambda: model.init(jax.random.key(0), jnp.zeros((2, *shape))))()
    choice = choose_adaptation("tsmobn", model, 4)
    about = served_folder.About(
        **{"form": 1, "library": "", "model": "MLP", "compute_dtype": "float32"},
        **{"method": "fedavg", "dataset": "tiny", "round": 1, "classes": ["a", "b", "c"]},
        **{"shape": list(shape), "dtype": "uint8", "mean": [0.5], "std": [0.5]},
        **{"adaptations": ["running", "tsmobn"], "programs": {}, "batch_size": 4},
        **{"orientation": "upright", "masks": ""},
    )
    place = tmp_path_factory.mktemp("whole") / "served"
    served_folder.write_served(place, about, start, {"tsmobn": choice})
    return place


@pytest.fixture
def served(whole, tmp_path):
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "served")


def said_by_predict(place, tmp_path, capfd, *more):
    """The one line that `predict` says of a folder, which ends it."""
    np.savez(tmp_path / "i.npz", images=IMAGES)
    given = [f"--model={place}", f"--data={tmp_path / 'i.npz'}", f"--out={tmp_path / 'out.csv'}"]
    assert runs.command("predict", *given, *more) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert not (tmp_path / "out.csv").exists()
    return line


@pytest.mark.parametrize("change", [{"model": "evil:Net"}, {"adaptations": ["evil:f"]}])
def test_code_that_only_model_json_names_is_not_imported(
    served, tmp_path, capfd, change, monkeypatch
):
    (served / "evil.py").write_text("open('evil-ran', 'w')")
    monkeypatch.chdir(served)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    edit(served, **change)
    said_by_predict(served, tmp_path, capfd)
    assert "evil" not in sys.modules
    assert not (served / "evil-ran").exists()


def test_arrays_of_objects_are_one_sentence_and_not_unpickled(served, tmp_path, capfd):
    arrays, kernel = dict(np.load(served / "variables.npz")), "params/dense1/kernel"
    np.savez(served / "variables.npz", **arrays | {kernel: arrays[kernel].astype(object)})
    assert str(served / "variables.npz") in said_by_predict(served, tmp_path, capfd)


def with_program(place, run):
    """Makes the folder that of a model of somebody's own, with `run` as its program."""
    arrays = np.load(place / "variables.npz")
    form = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
    batch = jax.ShapeDtypeStruct((4, 4, 4, 3), np.uint8), jax.ShapeDtypeStruct((4,), bool)
    allowed = [jax_export.DisabledSafetyCheck.custom_call("xla_ffi_python_cpu_callback")]
    program = jax_export.export(jax.jit(run), disabled_checks=allowed)(form, {}, *batch)
    edit(place, model="my_model:Net", adaptations=["tsmobn"], programs={"tsmobn": PROGRAM})
    np.savez(place / "programs" / "tsmobn.npz")
    (place / "programs" / "tsmobn.stablehlo").write_bytes(program.serialize())


PROGRAM = {"batch_size": 4, "order": 0}
FOUND = jax.ShapeDtypeStruct((4, 3), jnp.float32)


def with_callback(arrays, carry, images, valid):
    """A program that calls a function of the process by its name."""
    given = images.astype(jnp.float32)[:, :, :, 0]
    return jax.ffi.ffi_call("xla_ffi_python_cpu_callback", (FOUND,))(given)[0], carry


def test_a_program_of_a_folder_needs_trust_and_makes_no_custom_call(served, tmp_path, capfd):
    with_program(served, with_callback)
    said = said_by_predict(served, tmp_path, capfd)
    assert "'my_model:Net'" in said
    assert "--trust" in said
    assert "custom call" in said_by_predict(served, tmp_path, capfd, "--trust")


def test_a_model_with_linear_algebra_is_refused_when_it_is_exported(whole, tmp_path):
    def factored(variables, carry, images, valid=None):
        return jnp.linalg.qr(images[:, 0, :, :])[0].reshape(len(images), -1), carry

    choice = Choice(Adaptation(lambda variables: (), factored), 4, 0)
    variables, about = {"params": {"x": jnp.ones(1)}}, served_folder.About.read(whole)
    with pytest.raises(ValueError, match="custom call"):
        served_folder.write_served(tmp_path / "x", about, variables, {"own:qr": choice})
    assert not list(tmp_path.iterdir())
