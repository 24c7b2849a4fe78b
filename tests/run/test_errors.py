"""Every mistake of a user ends with an error of one line and leaves nothing half-written."""

import numpy as np
import pytest

import runs
from fedjax_bn import main
from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.run import train
from fedjax_bn.run.config import base
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.files import ownership
from fedjax_bn.training import workdir

QUICK = f"{runs.ROOT}/configs/quickstart.py"

# arguments after --config QUICK, and what the message must hold
MISTAKES = [
    (["--config.rounds"], ["config.rounds=''"]),
    (["--config.method=fedbm"], ["'fedbm'", "did you mean 'fedbn'?", "singleset"]),
    (["--config.model=ResNet19"], ["'ResNet19'", "did you mean 'ResNet18'?", "DigitCNN"]),
    (["--config.data.name=cifar"], ["'cifar'", "did you mean 'cifar10_c'?", "digits, digits_dg"]),
    (["--config.weigh=size"], ["'size'", "by_size"]),
    (["--config.method=fedavg", "--config.model=SmallDigitCNN:norm=group"], ["no batch norm"]),
    (["--config.target=faks"], ["target 'faks'", "flatbed"]),
    (["--config.clients=foo"], ["clients='foo'", "'vmap:at_once=n'"]),
    (["--config.clients_per_round=6"], ["clients_per_round=6", "5 clients"]),
    (["--config.eval_clients=6"], ["eval_clients=6", "5 clients"]),
    (["--config.population=host"], ["population=host", "clients_per_round=0"]),
    (["--config.data.image_size=64"], ["image_size=64", "set it to 28"]),
    (["--config.data.name=digits"], ["'digits' is not embedded", "--config.data.path=PATH"]),
    (["--config.model=MLP", "--config.batch_size=179"], ["one sample", "'norm1'", "batch_size"]),
    (["--config.method=fedprox:mu"], ["'mu' must be", "write mu=VALUE"]),
    (["--config.method=fedprox:nu=1"], ["'nu=1' must be key=value", "did you mean 'mu'?"]),
    (["--config.baselines=fedprox:mu=-1"], ["mu=-1.0 must be at least 0"]),
    (["--config=none.py"], ["no config file 'none.py'"]),
]


def fails(capfd, *arguments: str, status: int = 2) -> str:
    """Returns the line with which the command fails."""
    capfd.readouterr()
    assert runs.command(*arguments) == status
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("fedjax_bn: ")
    return lines[0]


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(train, "open_rounds", lambda *_: pytest.fail("compiled"))


@pytest.fixture(scope="module", autouse=True)
def embedded():
    """The embedded data, made once."""
    data_sets, made = experiment.DATASETS, {}
    real = data_sets["scanners"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(data_sets, "scanners", lambda _, seed=0, shared_test=False: made["data"])
        made["data"] = real(base())
        yield


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=lambda x: x[0].removeprefix("--"))
def test_a_mistake_names_culprit_and_remedy_in_one_line_and_makes_no_workdir(
    tmp_path, capfd, arguments, parts
):
    folder = tmp_path / "run"
    text = fails(
        capfd, "--config", QUICK, "--config.target=fax", "--workdir", str(folder), *arguments
    )
    for part in parts:
        assert part in text
    assert not folder.exists()


def arrays_of(**changes):
    """Arrays of two domains, as `data.path` takes them, of which some are changed or left out."""
    arrays = {}
    for name in ("a", "b"):
        for part, size in (("train", 20), ("test", 10)):
            arrays[f"{name}__{part}_images"] = np.zeros((size, 28, 28, 3), np.uint8)
            arrays[f"{name}__{part}_labels"] = np.arange(size, dtype=np.int64) % 10
    for name, change in changes.items():
        arrays[name] = change(arrays[name])
    return {name: array for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        (None, ["is not a file", "a .npz with"]),
        ({}, ["cannot be read"]),
        (arrays_of(b__test_labels=lambda labels: None), ["b__test_labels"]),
        (
            arrays_of(b__train_labels=lambda labels: labels + 7 * (np.arange(20) == 3)),
            ["the train split of 'b' has label 10 at index 3", "0..9"],
        ),
        (arrays_of(a__train_images=lambda images: images[..., :1]), ["[N, 28, 28, 3]"]),
        (arrays_of(a__train_labels=lambda labels: labels[:-1]), ["a__train_labels", "(19,)"]),
    ],
    ids=["missing", "torn", "no labels", "label", "channels", "fewer labels"],
)
def test_a_bad_data_file_is_named_with_its_fault(tmp_path, capfd, arrays, parts):
    file, folder = tmp_path / "own.npz", tmp_path / "run"
    if arrays is not None:
        np.savez(file, **arrays or arrays_of())
    if arrays == {}:
        file.write_bytes(file.read_bytes()[:2000])
    keys = (f"--config={runs.ROOT}/configs/digits.py", f"--config.data.path={file}")
    text = fails(capfd, *keys, f"--workdir={folder}")
    for part in (str(file), *parts):
        assert part in text
    assert not folder.exists()


def test_a_folder_that_is_no_workdir_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("important")
    before = runs.files(tmp_path)
    for place in (tmp_path, tmp_path / "thesis.tex", tmp_path / "thesis.tex" / "below"):
        with pytest.raises(WorkdirError, match="--workdir"):
            ownership.claim(place, {}, {})
    assert runs.files(tmp_path) == before


def test_a_folder_that_a_run_was_killed_in_at_once_is_accepted(tmp_path):
    (tmp_path / ".config.json.123").write_text("{")
    ownership.claim(tmp_path, {"rounds": 3}, {"data": "x"})
    assert workdir.read_json(tmp_path / "config.json") == {"config": {"rounds": 3}, "data": "x"}


def test_ctrl_c_before_the_first_round_ends_with_one_line_and_130(tmp_path, monkeypatch, capfd):
    def interrupted(*_):
        raise KeyboardInterrupt

    runs.install(monkeypatch)
    monkeypatch.setattr(train, "open_rounds", interrupted)
    monkeypatch.setattr(main, "read", lambda source, changes: runs.config())
    folder = tmp_path / "run"
    text = fails(capfd, "--config=tiny.py", f"--workdir={folder}", status=130)
    assert "give the same command to continue" in text
