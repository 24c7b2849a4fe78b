"""Runs on domains with any names: nothing is written outside the workdir, no number is hidden."""

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.report.page import write_report
from fedjax_bn.run import commands, serve
from fedjax_bn.run import finished_run as evaluate_finished
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.datasets import domain_names
from fedjax_bn.run.finished_run import Request
from fedjax_bn.serving import load
from fedjax_bn.training import plots, workdir

NAMES = ("../../evil", "$a$ <b>\n", "\udcff", "_a_b")


def renamed(*names: str) -> Dataset:
    domains = zip(runs.DATA.domains, names, strict=True)
    return runs.DATA._replace(domains=tuple(d._replace(name=name) for d, name in domains))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A finished run that left the domain "../../evil" out, two folders deep."""
    place = tmp_path_factory.mktemp("odd")
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch, renamed(*NAMES), draw=True)
        patch.setattr(commands, "domain_names", lambda config: NAMES[:1])
        config = runs.config(target="each", rounds=1)
        commands.train_all(config, place / "x" / "run", write_report)
        yield place


def files(place):
    return {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_target_is_a_folder_in_the_workdir(place):
    folder = place / "x" / "run" / "%2E.%2F..%2Fevil"
    assert all(name.startswith("x/run/") for name in files(place))
    summary = workdir.read_json(folder / "summary.json")
    assert list(summary["accuracy"]["internal"]) == [*NAMES[1:], "mean"]
    assert list(summary["accuracy"]["unseen"]) == [NAMES[0]]
    assert runs.scalars(folder) == runs.expected_scalars(folder)
    assert f"accuracy/{NAMES[1]}".replace("\n", "\\n") in runs.scalars(folder)
    page = (folder / "report.html").read_text()
    assert "<b>" not in page
    assert "$a$ &lt;b&gt;\\n" in page


@pytest.mark.parametrize("name", ["../../x", "/x", ".", ""])
def test_an_evaluation_of_any_name_stays_among_the_evaluations(place, name):
    folder = place / "x" / "run" / "%2E.%2F..%2Fevil"
    before = files(place)
    _, (*_, written) = evaluate_finished.run(folder, Request(name=name), say=str)
    assert written.parent == folder / "evaluations"
    assert written.suffix == ".json"
    assert files(place) - before == {written.relative_to(place).as_posix()}


@pytest.mark.parametrize("name", ["mean", "adaptation"])
def test_a_client_that_would_hide_a_key_of_the_files_is_refused(tmp_path, monkeypatch, name):
    runs.install(monkeypatch, renamed("ant", name, "cow", "dog"))
    with pytest.raises(ConfigError, match=f"'{name}'"):
        runs.run(tmp_path / "run", rounds=1)
    with pytest.raises(ConfigError, match="rename it"):
        domain_names(runs.config(target="each"))
    assert not (tmp_path / "run").exists()


def test_a_workdir_whose_name_is_a_pattern_of_files_is_continued_and_served(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    folders = tmp_path / "plain", tmp_path / "a[1]*?" / "[b]"
    for folder in folders:
        runs.run(folder, rounds=1)
        runs.run(folder, rounds=2)
    form = jax.eval_shape(experiment.prepare(runs.config())[2])
    plain, odd = (runs.saved(folder, form, "latest") for folder in folders)
    jax.tree.map(np.testing.assert_array_equal, plain, odd)
    served = []
    for number, folder in enumerate(folders):
        serve.run(folder, tmp_path / f"served{number}", ())
        predictor = load(tmp_path / f"served{number}")
        served.append(predictor.predict(11, runs.DATA.domains[0].test.images.__getitem__))
    np.testing.assert_array_equal(*served)


def test_a_picture_that_cannot_be_drawn_is_a_warning_and_the_run_has_its_results(
    tmp_path, monkeypatch
):
    runs.install(monkeypatch)

    def fail(*given: object, **options: object) -> bytes:
        raise TypeError("Invalid shape")

    for name in ("samples", "draw_class_counts"):
        monkeypatch.setattr(plots, name, fail)
    with pytest.warns(UserWarning, match="Invalid shape") as caught:
        commands.train_all(runs.config(rounds=1, target=""), tmp_path / "run", write_report)
    assert workdir.read_json(tmp_path / "run" / "summary.json")["rounds"] == 1
    assert (tmp_path / "run" / "report.html").exists()
    said = [str(one.message) for one in caught]
    for name in ("samples", "class_counts"):
        path = str(tmp_path / "run" / "plots" / f"{name}.png")
        assert any(path in text for text in said), name


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_samples_of_any_number_of_channels_are_drawn_by_their_first_one(channels, monkeypatch):
    monkeypatch.setattr(plots, "png", lambda figure: figure)
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, channels), np.uint8)
    split = Split(images, np.arange(3, dtype=np.int32))
    figure = plots.samples([Domain("a", split, split, split)], count=3)
    shown = figure.axes[0].images[0].get_array()
    if channels == 3:
        np.testing.assert_array_equal(shown[:, :8], images[0])
        return
    grey = images[0, ..., 0].astype(float)
    scaled = 255 * (grey - grey.min()) / np.ptp(grey)
    np.testing.assert_allclose(shown[:, :8, 0], scaled, atol=1)
