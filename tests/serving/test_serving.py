"""Serve and predict: what an unseen client receives gives the predictions of `evaluate`."""

import csv
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from datetime import date, timedelta
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

import runs
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.arguments.text import cell
from fedjax_bn.contrib import gperxan
from fedjax_bn.data.domain import whole
from fedjax_bn.engine.images import standardize
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.methods import fedbn, fediga
from fedjax_bn.models import MLP, ResNet10
from fedjax_bn.normalization import batch_statistics
from fedjax_bn.serving import load, predictor
from fedjax_bn.serving.folder import About, renew, write_served
from fedjax_bn.serving.predictor import Predictor
from small_images import dataset_of_images

ADAPTATIONS = ("running", "tsmobn:batch_size=4", "random_alpha", "sar", "t3a")
DATA = dataset_of_images(runs.NAMES, 0.4, 0.3, ("dark", "grey", "=bright"))
DOG = whole(DATA.domains[3])
KEYS = {"model": "MLP", "data__image_size": 8, "rounds": 2, "adapt_batch_size": 6}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    place = tmp_path_factory.mktemp("serving") / "run"
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch, DATA)
        summary = runs.run(place, adaptations=ADAPTATIONS, **KEYS)
    return place, summary["accuracy"]["unseen"]["dog"]


@pytest.fixture(scope="module")
def served(workdir):
    """The folder of a served model; the data that trained it are gone."""
    place = workdir[0].parent / "served"
    assert runs.command("serve", "--workdir", str(workdir[0]), "--export", str(place)) == 0
    return place


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Images as files in a folder of folders, in the order of their samples."""
    place = tmp_path_factory.mktemp("images")
    for number, image in enumerate(DOG.images):
        path = place / f"part{number // 10}" / f"{number:03}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
    (place / "notes.txt").write_text("no image")
    (place / ".ipynb_checkpoints").mkdir()
    Image.fromarray(DOG.images[0]).save(place / ".ipynb_checkpoints" / "000-checkpoint.png")
    return place


def table(text):
    """The header and the rows of a CSV; probabilities as f[N, classes]."""
    head, *rows = csv.reader(io.StringIO(text))
    return head, rows, np.array([row[2:] for row in rows], float)


@pytest.mark.parametrize("text", ADAPTATIONS)
def test_predictions_have_the_accuracy_that_training_recorded(workdir, served, text):
    found = load(served, text)(DOG.images)
    right = (found.argmax(1) == DOG.labels).mean() * 100
    assert right == pytest.approx(workdir[1][text])
    assert np.ptp(found, axis=0).max() > 1e-3  # images differ in what they get


def test_a_folder_of_files_and_an_archive_give_one_csv(served, files, tmp_path, capsys):
    np.savez(tmp_path / "dog.npz", dog__images=DOG.images, dog__labels=DOG.labels)
    given = ("--model", str(served), "--adapt", "tsmobn:batch_size=4")
    assert runs.command("predict", *given, "--data", str(files)) == 0
    head, rows, found = table(capsys.readouterr().out)
    classes = ("dark", "grey", "'=bright")  # which no spreadsheet takes for a formula
    assert head == ["image", "class", *classes]
    assert rows[12][0] == "part1/012.png"
    assert [row[1] for row in rows] == [classes[i] for i in found.argmax(1)]
    out = tmp_path / "out.csv"
    given = (*given, "--data", str(tmp_path / "dog.npz"), "--out", str(out))
    assert runs.command("predict", *given) == 0
    _, _, again = table(out.read_text())
    np.testing.assert_array_equal(again, found)
    np.testing.assert_allclose(found, load(served, "tsmobn:batch_size=4")(DOG.images), atol=1e-6)


def test_names_from_the_standard_input_are_a_stream_of_single_images(
    served, files, monkeypatch, capsys
):
    names = sorted(str(path) for path in files.rglob("*.png") if "/." not in str(path))[:5]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(names) + "\n\n"))
    given = ("--model", str(served), "--data", "-", "--adapt", "tsmobn")
    assert runs.command("predict", *given) == 0
    _, rows, found = table(capsys.readouterr().out)
    assert [row[0] for row in rows] == names
    single = load(served, "tsmobn:batch_size=1:order=-1")
    np.testing.assert_allclose(found, single(DOG.images[:5]), atol=1e-6)
    together = load(served, "tsmobn:order=-1")(DOG.images[:5])
    assert np.abs(found - together).max() > 1e-3  # each was tracked when it came


ALONE = """
import json, sys
sys.modules["fedjax_bn"] = None
import numpy as np
from jax import export
folder, images = sys.argv[1], np.load(sys.argv[2])
about = json.load(open(f"{folder}/model.json"))["programs"]["tsmobn:batch_size=4"]
name = f"{folder}/programs/tsmobn%3Abatch_size=4"
program = export.deserialize(bytearray(open(f"{name}.stablehlo", "rb").read()))
arrays, carry = dict(np.load(f"{folder}/variables.npz")), dict(np.load(f"{name}.npz"))
order = np.random.default_rng(about["order"]).permutation(len(images))
rows, B = [], about["batch_size"]
for start in range(0, len(images), B):
    batch = images[order[start : start + B]]
    valid = np.arange(B) < len(batch)
    batch = np.pad(batch, [(0, B - len(batch)), (0, 0), (0, 0), (0, 0)])
    found, carry = program.call(arrays, carry, batch, valid)
    rows.append(np.asarray(found)[valid])
np.save(sys.argv[3], np.concatenate(rows)[np.argsort(order)])
del sys.modules["fedjax_bn"]
from fedjax_bn import main
main.main(["main", "predict", *sys.argv[4:]])
training = ("fedjax_bn.methods", "fedjax_bn.federation", "fedjax_bn.client", "orbax", "grain")
sys.exit(", ".join(name for name in training if name in sys.modules) or 0)
"""


def test_a_fresh_process_predicts_by_the_program_alone_and_by_predict_without_training_code(
    served, tmp_path
):
    images, by_program, out = (str(tmp_path / name) for name in ("i.npy", "p.npy", "out.csv"))
    np.save(images, DOG.images)
    np.savez(tmp_path / "i.npz", images=DOG.images)
    given = ("--model", str(served), "--data", str(tmp_path / "i.npz"), "--out", out)
    command = [sys.executable, "-c", ALONE, str(served), images, by_program, *given]
    environment = os.environ | {"PYTHONPATH": str(runs.ROOT)}
    command += ["--adapt", "tsmobn:batch_size=4"]
    pipes = {"capture_output": True, "text": True}
    done = subprocess.run(command, env=environment, cwd=tmp_path, **pipes)
    assert done.returncode == 0, done.stderr
    expected = load(served, "tsmobn:batch_size=4")(DOG.images)
    np.testing.assert_allclose(np.load(by_program), expected, atol=1e-6)
    np.testing.assert_allclose(table(Path(out).read_text())[2], expected, atol=2e-6)


class Odd(nn.Module):
    """Its modules have names with what separates or quotes names."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train, name="norm/1 é")(x.reshape(len(x), -1))
        return nn.Dense(3, name="last layer%2F")(x)


@pytest.mark.parametrize(
    ("model", "method", "adapt"),
    [
        (Odd(), fedbn, "tsmobn"),
        pytest.param(*(ResNet10(3, width=2), fediga, "zero_shot_adapter"), marks=pytest.mark.slow),
        pytest.param(*(ResNet10(3, width=2), gperxan, "running"), marks=pytest.mark.slow),
    ],
)
def test_names_of_modules_and_collections_are_free(served, tmp_path, model, method, adapt):
    learner, key = method(model, optax.sgd(0.1)), jax.random.key(0)
    images = jnp.zeros((2, 8, 8, 3))
    state = jax.jit(lambda: learner.init(key, model.init(key, images), 3))()
    variables, place = global_variables(state), tmp_path / "odd"
    text = "my_model:Odd" if isinstance(model, Odd) else "ResNet10:width=2"
    facts = About.read(served)._replace(model=text, programs={}, adaptations=[adapt])
    write_served(place, facts, variables, {adapt: choose_adaptation(adapt, model, 4)})
    prepare = standardize(facts.mean, facts.std)
    expected = Predictor.by_choice(choose_adaptation(adapt, model, 4), variables, prepare)
    if not isinstance(model, Odd):
        np.testing.assert_allclose(load(place, adapt, 4)(DOG.images), expected(DOG.images), 1e-5)
        about = About.read(place)._replace(model="my_model:Net")
        (place / "model.json").write_text(json.dumps(about._asdict()))
    found = load(place, adapt, trust=True)(DOG.images)
    np.testing.assert_allclose(found, expected(DOG.images), 1e-5)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model": "{files}"}, "model.json"),
        ({"model": "{edited}"}, "form 0"),
        ({"model": "{torn}"}, "torn/variables.npz"),
        ({"model": "{other}"}, "SmallCNN"),
        ({"adapt": "tsmobm"}, "'tsmobn'"),
        ({"adapt": "ensemble"}, "ensemble"),
        ({"data": "{files}/none"}, "/none"),
        ({"data": "{broken}"}, "broken.png"),
        ({"data": "{larger}"}, "[9, 8, 3]"),
        ({"data": "{two}"}, "NAME__images"),
        ({"out": "{files}/none/out.csv"}, "none/out.csv"),
    ],
)
def test_a_mistake_is_one_sentence(served, files, tmp_path, capfd, changes, names):
    places = {"files": files, "broken": tmp_path / "broken.png"}
    places["broken"].write_bytes(b"\x89PNG no image")
    for name, images in (
        ("larger", {"images": np.zeros((2, 9, 8, 3), np.uint8)}),
        ("two", {"a__images": DOG.images, "b__images": DOG.images}),
    ):
        places[name] = tmp_path / f"{name}.npz"
        np.savez(places[name], **images)
    about = json.loads((served / "model.json").read_text())
    for name, edit in {"edited": {"form": 0}, "other": {"model": "SmallCNN"}, "torn": {}}.items():
        places[name] = tmp_path / name
        places[name].mkdir()
        (places[name] / "model.json").write_text(json.dumps(about | edit))
        content = (served / "variables.npz").read_bytes()
        (places[name] / "variables.npz").write_bytes(content[: -30 if name == "torn" else None])
    given = {"model": str(served), "data": str(files), "adapt": "", "out": ""} | changes
    flags = [f"--{key}={value.format(**places)}" for key, value in given.items()]
    assert runs.command("predict", *flags) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert names in line


def test_a_full_disk_leaves_no_half_folder(workdir, tmp_path, monkeypatch, capfd):
    def full(*args, **arrays):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    place = tmp_path / "served"
    assert runs.command("serve", "--workdir", str(workdir[0]), "--export", str(place)) == 2
    assert "No space left" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_evaluate_takes_another_place_another_size_and_no_target(workdir, tmp_path, monkeypatch):
    """New data are tested whole, and give what the run's own unseen domain did."""
    doubled = DOG.images.repeat(2, 1).repeat(2, 2)
    np.savez(tmp_path / "h.npz", hospital9__test_images=doubled, hospital9__test_labels=DOG.labels)
    monkeypatch.chdir(tmp_path)
    given = [f"--workdir={workdir[0]}", "--config.data.name=npz", "--config.data.path=h.npz"]
    given.append("--config.adaptations=running")
    assert runs.command("evaluate", *given) == 2
    assert runs.command("evaluate", *given, "--resize", "--name=new") == 0
    found = json.loads((workdir[0] / "evaluations" / "new.json").read_text())
    assert found["samples"] == {"hospital9": 26}
    # Pixels that are doubled and stretched back are not quite the same.
    expected = workdir[1]["running"]
    assert found["unseen"]["hospital9"]["running"] == pytest.approx(expected, abs=8)


STREAMS = ("running", "tsmobn", "tsmobn:order=7:batch_size=5", "random_alpha", "sar", "t3a")


# What is streamed does not depend on where it is read from, but the order of storage does.
@pytest.mark.parametrize(("form", "streams"), [("folders", STREAMS), ("npz", ("tsmobn:order=-1",))])
def test_the_csv_of_predict_is_that_of_evaluate(
    workdir, served, tmp_path, monkeypatch, form, streams
):
    """Sorted by class, and as files in another order of classes than the run's."""
    by_class = np.argsort(DOG.labels, kind="stable")
    images, labels = DOG.images[by_class], DOG.labels[by_class]
    place = data = tmp_path / "hospitals"
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = place / "hospital9" / DATA.classes[label] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    given = place / "hospital9"
    if form == "npz":
        data, given = tmp_path / "all.npz", tmp_path / "images.npz"
        np.savez(data, hospital9__images=images, hospital9__labels=labels)
        np.savez(given, images=images)
    monkeypatch.chdir(tmp_path)
    arguments = [f"--workdir={workdir[0]}", f"--config.data.name={form}", f"--name=by_{form}"]
    arguments += [f"--config.data.path={data}", "--config.predictions=csv"]
    assert runs.command("evaluate", *arguments, f"--config.adaptations={','.join(streams)}") == 0
    stored = (workdir[0] / "evaluations" / f"by_{form}-predictions.csv").read_text()
    evaluated = list(csv.reader(io.StringIO(stored)))[1:]
    different = set()
    for text in streams:
        asked = ("--model", str(served), "--data", str(given), "--adapt", text)
        assert runs.command("predict", *asked, "--out", "found.csv") == 0
        _, rows, found = table(Path("found.csv").read_text())
        theirs = [row for row in evaluated if row[1] == text]
        np.testing.assert_allclose(found, np.array([row[6:] for row in theirs], float), atol=2e-6)
        names = [cell(row[3].partition("/")[2]) for row in theirs]
        if form == "npz":
            names = [str(int(name)) for name in names]
        assert [row[0] for row in rows] == names  # in the order of the files
        different.add(found.tobytes())
    assert len(different) >= min(len(streams), 5)  # the order, and the batches, count


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--export={run}"], "--export"),
        (["--export=x", "--config.rounds=3"], "config.rounds"),
        (["--export=x", "--config.adaptations=ensemble"], "ensemble"),
        (["--export=x", "--config.adaptations=tsmo"], "'tsmobn'"),
    ],
)
def test_a_mistake_in_serving_is_one_sentence_and_writes_nothing(
    workdir, tmp_path, monkeypatch, capfd, arguments, names
):
    monkeypatch.chdir(tmp_path)
    given = [text.format(run=workdir[0]) for text in arguments]
    assert runs.command("serve", f"--workdir={workdir[0]}", *given) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert names in line
    assert not list(tmp_path.iterdir())


def bits_in(place):
    return {path.name: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_programs_say_until_when_jax_runs_them_and_are_written_anew(served, tmp_path, capfd):
    place = shutil.copytree(served, tmp_path / "served")
    (place / "notes.txt").write_text("of the user")
    about, torn = About.read(place), place / "programs" / "running.stablehlo"

    def rewrite(**changes):
        (place / "model.json").write_text(json.dumps(about._replace(**changes)._asdict()))

    begin, until = (date.fromisoformat(about.exported[key]) for key in ("date", "until"))
    late = until + timedelta(days=1)
    assert (begin, about.exported["jax"]) == (date.today(), jax.__version__)
    assert timedelta(days=175) < until - begin < timedelta(days=185)
    with warnings.catch_warnings(action="error"):
        expected = load(place, today=until)(DOG.images)
    with pytest.warns(UserWarning, match=f"{until}.*serve --renew {place}"):
        np.testing.assert_array_equal(load(place, today=late)(DOG.images), expected)
    about = about._replace(adaptations=["running"], programs={"running": about.programs["running"]})
    rewrite(exported=about.exported | {"jax": "0.4.30", "date": "2024-01-01"})
    before = bits_in(place)
    assert renew(place) == []
    torn.write_bytes(b"torn")
    assert renew(place) == ["running"]
    assert About.read(place) == about
    after = bits_in(place)
    assert before.keys() == after.keys()
    changed = {Path(name).suffix for name in before if before[name] != after[name]}
    assert changed <= {".json", ".stablehlo"}
    rewrite(model="my:Net")  # which is predicted by the program
    program = load(place, "running", trust=True)
    np.testing.assert_allclose(program(DOG.images), expected, atol=1e-6)
    # Programs that cannot be made from the folder stay as they are.
    for changes, remedy in (({"mean": [0.9]}, "from its run"), ({"model": "my:Net"}, "--export")):
        rewrite(**changes)
        before = bits_in(place)
        assert runs.command("serve", f"--renew={place}") == 2
        assert remedy in capfd.readouterr().err
        assert bits_in(place) == before
    assert runs.command("serve", f"--renew={served}", "--config.adaptations=running") == 2
    torn.write_bytes(b"torn")
    with (
        pytest.warns(UserWarning, match="--export"),
        pytest.raises(ValueError, match=f"running.*{until}.*--export"),
    ):
        load(place, "running", trust=True, today=late)
    rewrite(exported={"until": "soon"})
    with pytest.raises(ValueError, match=r"model\.json"):
        load(place)


def test_five_lines_of_python_prepare_as_training_did():
    model, key = MLP(num_classes=3, hidden=(4,)), jax.random.key(0)
    prepare = standardize((0.4,), (0.3,))
    method = fedbn(model, optax.sgd(0.1), prepare=prepare)
    start = jax.jit(lambda: method.init(key, model.init(key, jnp.zeros((2, 8, 8, 3))), 3))
    state = start()

    probabilities = predictor(method, global_variables(state))(DOG.images)
    own = predictor(method, client_variables(state, 2), adapt="batch:order=-1:batch_size=26")
    ruled = method._replace(statistics=batch_statistics)  # how its own clients predict
    as_client = predictor(ruled, client_variables(state, 2), adapt=None, batch_size=26)
    np.testing.assert_array_equal(as_client(DOG.images), own(DOG.images))

    variables = jax.tree.map(np.asarray, global_variables(state))
    (dense, head), (norm,) = (
        [variables["params"][name] for name in names] for names in (("dense1", "head"), ("norm1",))
    )
    images = DOG.images.astype(np.float64)
    x = (images / 255 - 0.4).reshape(26, -1) / 0.3 @ dense["kernel"] + dense["bias"]

    def rest(mean, var):
        y = np.maximum((x - mean) / np.sqrt(var + 1e-5) * norm["scale"] + norm["bias"], 0)
        logits = y @ head["kernel"] + head["bias"]
        return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)

    running = variables["batch_stats"]["norm1"]
    np.testing.assert_allclose(probabilities, rest(running["mean"], running["var"]), atol=1e-5)
    np.testing.assert_allclose(own(DOG.images), rest(x.mean(0), x.var(0)), atol=1e-4)
    with pytest.raises(ValueError, match="bytes"):
        own(images)
    with pytest.raises(ValueError, match="uint8"):
        model.init(key, DOG.images)
    with pytest.raises(ValueError, match=r"methods\.learning"):
        predictor(method._replace(learned=None), variables)
