"""Runs on domains with any names: nothing is written outside the workdir, no number is hidden."""

import numpy as np
import pytest

import runs
from fedjax_bn.data.domain import Dataset
from fedjax_bn.report.page import write_report
from fedjax_bn.run import evaluate as evaluate_finished
from fedjax_bn.run import serve, train
from fedjax_bn.run.evaluate import Request
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
        patch.setattr(train, "domain_names", lambda config: NAMES[:1])
        config = runs.config(target="each", rounds=1)
        train.train_all(config, place / "x" / "run", write_report)
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


@pytest.mark.parametrize("name", ["../../x", "/x"])
def test_an_evaluation_of_any_name_stays_among_the_evaluations(place, name):
    folder = place / "x" / "run" / "%2E.%2F..%2Fevil"
    before = files(place)
    _, (*_, written) = evaluate_finished.run(folder, Request(name=name), say=str)
    assert written.parent == folder / "evaluations"
    assert written.suffix == ".json"
    assert files(place) - before == {written.relative_to(place).as_posix()}


def test_a_workdir_whose_name_is_a_pattern_of_files_is_continued_and_served(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    odd = tmp_path / "a[1]*?" / "[b]"
    for rounds in (1, 2):
        runs.run(odd, rounds=rounds, eval_every=1)
    assert [line["round"] for line in runs.lines(odd)] == [1, 2]
    serve.run(odd, tmp_path / "served", ())
    images = runs.DATA.domains[0].test.images
    assert np.isfinite(load(tmp_path / "served").predict(11, images.__getitem__)).all()


def test_a_picture_that_cannot_be_drawn_is_a_warning_and_the_run_has_its_results(
    tmp_path, monkeypatch
):
    runs.install(monkeypatch)

    def fail(*given: object, **options: object) -> bytes:
        raise TypeError("Invalid shape")

    for name in ("samples", "draw_class_counts"):
        monkeypatch.setattr(plots, name, fail)
    with pytest.warns(UserWarning, match="Invalid shape") as caught:
        train.train_all(runs.config(rounds=1, target=""), tmp_path / "run", write_report)
    assert workdir.read_json(tmp_path / "run" / "summary.json")["rounds"] == 1
    assert (tmp_path / "run" / "report.html").exists()
    said = " ".join(str(warning.message) for warning in caught)
    for name in ("samples", "class_counts"):
        assert str(tmp_path / "run" / "plots" / f"{name}.png") in said
