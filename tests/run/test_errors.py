"""Every mistake of a user ends with an error of one line and leaves nothing half-written."""

import json
import zipfile
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest

import runs
from fedjax_bn import main
from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.run import train
from fedjax_bn.run.config.keys import base, flatten
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.task import MODELS
from fedjax_bn.run.files import ownership
from fedjax_bn.training import workdir

QUICK = f"{runs.ROOT}/configs/quickstart.py"

# arguments after --config QUICK, and what the message must hold
MISTAKES = [
    (["--config.rouds=3"], ["'rouds'; did you mean 'rounds'? `fedjax-bn list keys` names all"]),
    (["--config.rounds"], ["--config.rounds has no value", "--config.rounds=VALUE"]),
    (["--config.method=fedbm"], ["'fedbm'", "did you mean 'fedbn'?", "singleset"]),
    (["--config.baselines=fedavg,sinleset"], ["config.baselines='sinleset'", "'singleset'"]),
    (["--config.model=ResNet19"], ["'ResNet19'", "did you mean 'ResNet18'?", "DigitCNN"]),
    (["--config.data.name=cifar"], ["'cifar'", "did you mean 'cifar10_c'?", "digits, digits_dg"]),
    (["--config.share=all_but_bn"], ["'all_but_bn'", "all_but_statistics, everything, nothing"]),
    (["--config.weigh=size"], ["'size'", "by_size, coordinate_media"]),
    (["--config.optimizer.name=adm"], ["'adm'", "did you mean 'adam'?", "sgd"]),
    (["--config.adaptations=bach"], ["'bach'", "did you mean 'batch'?", "running"]),
    (
        ["--config.method=fedavg", "--config.model=SmallDigitCNN:norm=group"],
        ["a statistics rule chooses how batch norms normalize", "have no batch norm"],
    ),
    (["--config.target=faks"], ["'faks'", "did you mean 'fax'?", "flatbed"]),
    (["--config.clients=foo"], ["clients='foo'", "'vmap:at_once=n'"]),
    (["--config.clients=vmap:at_once=0"], ["clients='vmap:at_once=0'", "n >= 1"]),
    (["--config.clients=vmap:at_once=9"], ["9 clients at a time", "but there are", "or less"]),
    (["--config.clients_per_round=6"], ["clients_per_round=6", "5 clients"]),
    (["--config.data.clients_per_domain=100"], ["100 clients", "lower data.clients_per_domain"]),
    (["--config.data.image_size=64"], ["image_size=64", "28 pixels", "set it to 28"]),
    (["--config.data.path=here"], ["'here'", "embedded", "leave data.path empty"]),
    (["--config.data.name=digits"], ["'digits' is not embedded", "--config.data.path=PATH"]),
    (["--config.model=MLP", "--config.batch_size=179"], ["one sample", "'norm1'", "batch_size"]),
    (["--config.model=MLP", "--config.batch_size=1"], ["one sample", "180 training samples"]),
    (["--config.method=my:fed"], ["method='my:fed'", "module 'my' cannot be imported"]),
    (["--config.method=fedprox:nu=1"], ["'nu=1' must be key=value with a key of mu"]),
    (
        ["--config.baselines=fedprox:mu=-1"],
        ["baselines='fedprox:mu=-1'", "mu=-1.0 must be at least 0"],
    ),
    (["--config.method=math:fed"], ["module 'math' has no function or class 'fed'"]),
    (["--config.model=ResNet"], ["model='ResNet'", "missing a required", "'stage_sizes'"]),
    (["--config.model=DigitCNN:wide=3"], ["'wide=3' must be key=value with a key of norm, width"]),
    (["rounds=3"], ["unrecognized arguments: rounds=3"]),
    (["--rounds=3"], ["unrecognized arguments: --rounds=3"]),
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
def nothing_is_compiled(monkeypatch, request):
    """Fails a test in which a round is compiled, but for those that train on purpose."""
    if "trains" not in request.fixturenames:
        monkeypatch.setattr(train, "open_rounds", lambda *_: pytest.fail("compiled"))


@pytest.fixture
def trains(monkeypatch):
    runs.install(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def embedded():
    """The embedded data, made once."""
    real, made = experiment.DATASETS["scanners"], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(experiment.DATASETS, "scanners", lambda config: made["data"])
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


def test_no_config_a_missing_one_and_a_wrong_one_are_told_apart(tmp_path, capfd):
    assert "give a config: --config quickstart" in fails(capfd)
    assert "no config file 'configs/none.py'" in fails(capfd, "--config=configs/none.py")
    assert "did you mean 'quickstart'?" in fails(capfd, "--config=quikstart")
    file = tmp_path / "mine.py"
    file.write_text("def get_config(:\n")
    assert f"{file}, line 1: invalid syntax" in fails(capfd, "--config", str(file))
    assert "workdir" in fails(capfd, "--config", QUICK, "--workdir")


@pytest.mark.parametrize(
    ("arguments", "owners"),
    [
        (["serve", "--workdir=x", "--export=y", f"--config={QUICK}"], "--config"),
        (["predict", "--model=x", "--data=y", "--workdir=x"], "--workdir"),
        (["evaluate", "--workdir=x", "--distributed"], "--distributed"),
        ([f"--config={QUICK}", "--tsne"], "--tsne"),
    ],
)
def test_a_flag_of_another_command_is_refused(capfd, arguments, owners):
    assert owners in fails(capfd, *arguments)


def test_a_process_of_its_own_prints_one_line_and_no_traceback():
    given = ("--config", QUICK, "--config.target=fax", f"--workdir={__file__}")
    process = runs.start(*given)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert errors.count("\n") == 1, errors
    assert "is a file" in errors


def arrays(labels: int = 10) -> dict[str, np.ndarray]:
    """Two domains of plain images, as `data.path` takes them."""
    made = {}
    for name in ("a", "b"):
        for part, size in (("train", 20), ("test", 10)):
            made[f"{name}__{part}_images"] = np.zeros((size, 28, 28, 3), np.uint8)
            made[f"{name}__{part}_labels"] = np.arange(size, dtype=np.int64) % labels
    return made


def saved(change):
    """Writes the arrays after a change to them."""

    def write(path: Path) -> None:
        change(made := arrays())
        np.savez(path, **made)

    return write


def spoilt(change):
    """Writes the arrays, and changes the bytes of the file."""

    def write(path: Path) -> None:
        np.savez(path, **arrays())
        path.write_bytes(change(bytearray(path.read_bytes())))

    return write


def other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing here")


def with_label(name: str, index: int, label: int):
    return saved(lambda made: made[name].__setitem__(index, label))


def cut(name: str, part):
    return saved(lambda made: made.update({name: made[name][part]}))


@pytest.mark.parametrize(
    ("write", "parts"),
    [
        (lambda path: None, ["is not a file", "a .npz with"]),
        (Path.touch, ["cannot be read", "fetch it again"]),
        (spoilt(lambda data: data[: len(data) // 2]), ["cannot be read", "fetch it again"]),
        (spoilt(lambda data: data[:2000] + b"?" + data[2001:]), ["be read", "fetch it again"]),
        (lambda path: path.write_text("label,pixel\n"), ["cannot be read"]),
        (other_zip, ["readme.txt", "allowed are DOMAIN__images"]),
        (saved(lambda made: made.pop("b__test_labels")), ["b__test_labels"]),
        (
            with_label("b__train_labels", 3, 10),
            ["the train split of 'b' has label 10 at index 3", "0..9"],
        ),
        (with_label("a__test_labels", 0, -1), ["a__test_labels has label -1 at index 0", "from 0"]),
        (
            cut("a__train_images", np.s_[..., :1]),
            ["(20, 28, 28, 1)", "[N, 28, 28, 3]"],
        ),
        (cut("a__train_labels", np.s_[:-1]), ["20 samples", "19 labels"]),
    ],
    ids=lambda x: x[0].replace(" ", "_") if isinstance(x, list) else "",
)
def test_a_bad_data_file_is_named_with_its_fault(tmp_path, capfd, write, parts):
    file, folder = tmp_path / "own.npz", tmp_path / "run"
    write(file)
    text = fails(
        capfd,
        f"--config={runs.ROOT}/configs/digits.py",
        f"--config.data.path={file}",
        f"--workdir={folder}",
    )
    for part in (str(file), *parts):
        assert part in text
    assert not folder.exists()


class Plain(nn.Module):
    """A model without batch norm."""

    num_classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        return nn.Dense(self.num_classes)(images.reshape(images.shape[0], -1))


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_a_rule_that_keeps_batch_norm_local_refuses_a_model_that_has_none(
    tmp_path, monkeypatch, capfd, method
):
    monkeypatch.setitem(MODELS, "Plain", Plain)
    folder = tmp_path / "run"
    arguments = (f"--config.method={method}", "--config.model=Plain", f"--workdir={folder}")
    text = fails(capfd, f"--config={QUICK}", "--config.target=fax", *arguments)
    assert "the model has no batch norm" in text
    assert not folder.exists()


def test_a_workdir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WorkdirError, match="--workdir"):
        ownership.claim(tmp_path / "file", {}, {})
    with pytest.raises(WorkdirError, match="--workdir"):
        ownership.claim(tmp_path / "file" / "below", {}, {})


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("important")
    before = runs.files(tmp_path)
    with pytest.raises(WorkdirError, match=r"\(thesis\.tex"):
        ownership.claim(tmp_path, {}, {})
    assert runs.files(tmp_path) == before


def test_an_empty_folder_and_one_that_a_run_was_killed_in_at_once_are_accepted(tmp_path):
    (tmp_path / ".config.json.123").write_text("{")
    ownership.claim(tmp_path, {"rounds": 3}, {"data": "x"})
    assert workdir.read_json(tmp_path / "config.json") == {"config": {"rounds": 3}, "data": "x"}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"config": {}}', "\x00\xff"])
def test_a_damaged_config_json_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(WorkdirError, match=r"config.json.*move that folder away or give another"):
        ownership.claim(tmp_path, {"rounds": 3}, {"data": "x"})
    assert (tmp_path / "config.json").read_text(encoding="latin-1") == content


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_summary_json_is_named_and_the_workdir_is_left_alone(
    tmp_path, trains, content, monkeypatch
):
    config = runs.config()
    experiment_, _, _ = train.prepare(config)
    flat = dict(flatten(config))
    ownership.claim(tmp_path / "run", flat, {"data": train.data_hash(experiment_)})
    (tmp_path / "run" / "summary.json").write_text(content)
    before = runs.files(tmp_path)
    with pytest.raises(WorkdirError, match=r"cannot read .*summary.json"):
        runs.run(tmp_path / "run")
    assert runs.files(tmp_path) == before


def line(number, name="ant"):
    """A line of metrics.jsonl."""
    record = {"round": number, "loss": {name: 1.5}, "weights": {name: 1.0}, "seconds": 0.1}
    return json.dumps(record).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "bad"),
    [
        (b"", 1),
        (line(1) + b'{"rou', 2),
        (line(1) + line(3), 2),
        (line(1) + b"[]\n" + line(3), 2),
        (b"\xff\xfe\n", 1),
    ],
)
def test_damaged_metrics_are_named_with_the_round(tmp_path, content, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(WorkdirError, match=f"round {bad} of the 3"):
        workdir.read_lines(path, 3)


def test_metrics_after_the_checkpoint_are_dropped_however_torn(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2) + line(3)[:-20])
    assert workdir.read_lines(path, 2) == [json.loads(line(1)), json.loads(line(2))]


def test_ctrl_c_before_the_first_round_ends_with_one_line_and_130(
    tmp_path, trains, monkeypatch, capfd
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "open_rounds", interrupted)
    monkeypatch.setattr(main, "read", lambda source, changes: runs.config())
    folder = tmp_path / "run"
    text = fails(capfd, "--config=tiny.py", f"--workdir={folder}", status=130)
    assert "give the same command to continue" in text
