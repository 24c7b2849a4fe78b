"""Runs on domains with any names: nothing is written outside the workdir, no number is hidden."""

import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset
from fedjax_bn.report.page import write_report
from fedjax_bn.run import commands
from fedjax_bn.run import finished_run as evaluate_finished
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.datasets import domain_names
from fedjax_bn.run.finished_run import Request
from fedjax_bn.training import workdir

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
        commands.train_all(config, place / "x" / "run")
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


@pytest.mark.parametrize("name", ["../../x", "/x", "x-alphas-y", "x-tsne", ".", ""])
def test_an_evaluation_of_any_name_stays_among_the_evaluations(place, name):
    folder = place / "x" / "run" / "%2E.%2F..%2Fevil"
    before = files(place)
    _, (*_, written) = evaluate_finished.run(folder, Request(name=name), say=str)
    assert written.parent == folder / "evaluations"
    assert written.suffix == ".json"
    assert files(place) - before == {written.relative_to(place).as_posix()}
    assert not any(kind in written.name for kind in ("-alphas", "-tsne"))


@pytest.mark.parametrize("name", ["mean", "method", "adaptation"])
def test_a_client_that_would_hide_a_key_of_the_files_is_refused(tmp_path, monkeypatch, name):
    runs.install(monkeypatch, renamed("ant", name, "cow", "dog"))
    with pytest.raises(ConfigError, match=f"tiny has a client or domain '{name}', .*: rename it"):
        runs.run(tmp_path / "run", rounds=1)
    with pytest.raises(ConfigError, match="rename it"):
        domain_names(runs.config(target="each"))
    assert not (tmp_path / "run").exists()


def test_a_client_and_an_unseen_domain_have_different_names(tmp_path, monkeypatch):
    runs.install(monkeypatch, renamed("a", "b", "c", "a/1"))
    keys = {"target": "a/1", "data__clients_per_domain": 2}
    with pytest.raises(ConfigError, match="two domains or clients are called 'a/1'; rename one"):
        runs.run(tmp_path / "run", **keys)


def test_a_baseline_of_ones_own_has_a_folder_of_its_own(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    assert experiment.DATASETS["tiny"](None) is runs.DATA
    config = runs.config(baselines=("fedavg", "fedprox:mu=0.5"))
    folders = [
        folder.relative_to(tmp_path).as_posix() for _, folder in commands.runs(config, tmp_path)
    ]
    assert folders == [".", "baselines/fedavg", "baselines/fedprox%3Amu=0.5"]


def test_reports_of_runs_are_read_again_from_their_files(place):
    folder = place / "x" / "run" / "%2E.%2F..%2Fevil"
    before = (folder / "report.html").read_bytes()
    write_report(folder)
    assert (folder / "report.html").read_bytes() == before
