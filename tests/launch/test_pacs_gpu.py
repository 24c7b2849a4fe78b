"""PACS for minutes on a GPU: the packages, and runs that stop and continue, on tiny images."""

import re
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pacs_gpu
import pytest
import sweep
from PIL import Image
from safetensors.numpy import load_file, save_file

from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS


def write_pacs(folder, rng):
    for domain in pacs_gpu.PACS.targets:
        for name in IMAGE_FOLDERS["pacs"].classes:
            place = folder / domain / name
            place.mkdir(parents=True)
            for i in range(2):
                Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8)).save(place / f"{i}.jpg")


def test_packages_hold_all_images_in_the_best_quality_below_the_limit(tmp_path, capsys):
    rng = np.random.default_rng(0)
    write_pacs(tmp_path / "pacs", rng)
    tensors = {"conv1.weight": rng.normal(size=(4, 3, 7, 7)), "bn1.running_var": np.full(4, 1e-9)}
    save_file({k: t.astype(np.float32) for k, t in tensors.items()}, tmp_path / "weights")

    def packed(limit):
        pacs_gpu.pack(tmp_path / "pacs", tmp_path / "weights", tmp_path / "to", 32, limit)
        with tarfile.open(tmp_path / "to" / "images.tar") as archive:
            files = [entry for entry in archive if entry.isfile()]
            sides = {Image.open(archive.extractfile(entry)).size for entry in files}
        return int(re.search(r"quality (\d+)", capsys.readouterr().out)[1]), len(files), sides

    whole = packed(10**6)
    size = (tmp_path / "to" / "images.tar").stat().st_size
    smaller = packed(size)
    assert whole == (95, 56, {(32, 32)})
    assert smaller[0] < 95
    assert smaller[1:] == whole[1:]
    assert (tmp_path / "to" / "images.tar").stat().st_size < size
    with pytest.raises(SystemExit):
        packed(100)
    small = load_file(tmp_path / "to" / "weights.safetensors")
    np.testing.assert_allclose(small["conv1.weight"], tensors["conv1.weight"], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(small["bn1.running_var"], np.float32(1e-9))


# A run: FedIG-A adds three rounds, others two; the accuracy is ten times the round, and the second
# is selected. If told to wait, it then adds one more at SIGTERM.
RUN = """
import json, pathlib, signal, sys
folder, target, wait = sys.argv[1:]
path = pathlib.Path(folder, "metrics.jsonl")
path.parent.mkdir(parents=True, exist_ok=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
def add():
    number = 1 + (len(path.read_text().splitlines()) if path.exists() else 0)
    score = {"running": 10.0 * number, "zero_shot_adapter": 10.0 * number + 1}
    record = {"validation": {"mean": -abs(number - 2)}, "unseen": {target: score}}
    with path.open("a") as file:
        print(json.dumps({"round": number, **record}), file=file)
for _ in range(3 if "fediga" in folder else 2):
    add()
if wait:
    signal.sigwait([signal.SIGTERM])
    add()
sys.exit(130)
"""


def test_runs_stop_after_a_round_continue_and_are_compared_at_equal_rounds(
    tmp_path, monkeypatch, capsys
):
    write_pacs(tmp_path / "pacs", np.random.default_rng(0))
    save_file({"conv1.weight": np.zeros((1, 1, 1, 1), np.float32)}, tmp_path / "weights")
    pacs_gpu.pack(tmp_path / "pacs", tmp_path / "weights", tmp_path / "to", 8, 10**6)
    wait = ""

    def command(run, workdir, data, changes):
        assert (Path(data["pacs"]) / "photo/dog/0.jpg").exists()
        assert changes == ["--config.seed=1"]
        return ["-c", RUN, str(workdir / run.name), run.changes["target"], wait]

    def table():
        folders = ("--packages", str(tmp_path / "to"), "--workdir", str(tmp_path / "runs"))
        capsys.readouterr()
        pacs_gpu.main(["run", *folders, "--minutes", "9", "--config.seed=1"])
        lines = capsys.readouterr().out.splitlines()
        return {cells[0]: cells[1:] for cells in (line[2:-2].split(" | ") for line in lines)}

    monkeypatch.setattr(sweep, "train_command", command)
    expected = {"FedAvg": ["20.0"] * 4, "FedIG-A": ["21.0"] * 4}
    assert table().items() >= {"rounds of 40": ["2"] * 4, **expected}.items()
    assert table().items() >= {"rounds of 40": ["4"] * 4, **expected}.items()

    wait, run = "wait", pacs_gpu.SWEEP.runs[0]
    monkeypatch.setattr(pacs_gpu, "SWEEP", SimpleNamespace(runs=[run]))
    pacs_gpu.train_all(tmp_path / "to", tmp_path / "runs", 0.02, ["--config.seed=1"])
    assert len(pacs_gpu.records_of(run, tmp_path / "runs")) == 7
