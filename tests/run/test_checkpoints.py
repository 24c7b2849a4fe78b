"""Checkpoints of a run: which are kept, and damaged, older or other ones."""

import shutil
from pathlib import Path

import jax
import pytest
from test_resume import assert_same_end, finished, straight, tiny

import runs
from fedjax_bn.arguments.errors import CheckpointError
from fedjax_bn.run import train
from fedjax_bn.training import checkpoint
from fedjax_bn.training.records import select_round

__all__ = ("finished", "straight", "tiny")  # fixtures


@pytest.mark.parametrize(("latest", "selected"), [(6, 4), (6, 6)])
def test_a_finished_run_keeps_its_last_round_and_the_selected_one(tmp_path, latest, selected):
    names = [f"latest/{latest}", "latest/4", f"selected/{selected}"]
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
    checkpoint.delete_earlier(tmp_path)
    assert runs.steps(tmp_path) == [6] * (latest != selected)
    assert runs.steps(tmp_path, "selected") == [selected]


@pytest.mark.slow
def test_without_its_newest_checkpoint_a_run_continues_from_the_one_before(tmp_path, straight):
    folder = runs.unfinished(tmp_path / "older", runs.config())
    assert runs.steps(folder) == [4, 6]
    shutil.rmtree(folder / "checkpoints" / "latest" / "6")
    said = []
    train.run(runs.config(), folder, say=said.append)
    assert any("continuing from round 4 of 6" in text for text in said)
    assert_same_end(folder, straight, runs.config())


def test_the_selected_checkpoint_is_on_disk_before_a_run_could_go_on_behind_it(
    tmp_path, monkeypatch
):
    real, folder = checkpoint.save, tmp_path / "run"

    def save(manager, number, state):
        if manager.directory.name == "latest":
            records = [record for record in runs.lines(folder) if "validation" in record]
            if records:
                assert runs.steps(folder, "selected") == [select_round(runs.lines(folder))]
        real(manager, number, state)

    monkeypatch.setattr(checkpoint, "save", save)
    runs.run(folder)


def unfinished(straight: Path) -> Path:
    """The newest checkpoint of a run that still has its summary to write."""
    (straight / "summary.json").unlink()
    return straight / "checkpoints" / "selected" / "6"  # its last round too


def largest(folder: Path) -> Path:
    """The file with the arrays."""
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder: Path) -> None:
    file = largest(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(folder: Path) -> None:
    content = bytearray(largest(folder).read_bytes())
    content[len(content) // 2] ^= 4
    largest(folder).write_bytes(content)


def delete_the_manifest(folder: Path) -> None:
    (folder / "default" / "manifest.ocdbt").unlink()


def delete_the_checksums(folder: Path) -> None:
    (folder / checkpoint.CHECKSUMS).unlink()


DAMAGES = (truncate, flip_a_bit, delete_the_manifest, delete_the_checksums)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_nothing_is_compiled_or_changed(
    straight, monkeypatch, capfd, damage
):
    newest = unfinished(straight)
    damage(newest)
    before = runs.files(straight)
    monkeypatch.setattr(train, "open_rounds", lambda *_: pytest.fail("compiled"))
    with pytest.raises(CheckpointError, match="delete that folder and run again") as error:
        runs.run(straight)
    assert str(newest) in str(error.value)
    assert "\n" not in str(error.value)
    assert runs.files(straight) == before
    assert "Traceback" not in capfd.readouterr().err


def test_another_sharing_rule_is_called_that_and_no_checkpoint_is_to_be_deleted(straight):
    like = jax.eval_shape(train.prepare(runs.config(method="fedavg"))[2])
    with pytest.raises(CheckpointError, match=r"/norm1/.* there and nothing now") as error:
        runs.saved(straight, like)
    assert "delete" not in str(error.value)
    assert "norm1" in str(error.value)
