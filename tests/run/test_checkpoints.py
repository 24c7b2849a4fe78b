"""Checkpoints of a run: which are kept, and damaged, older or other ones."""

from pathlib import Path

import pytest

import runs
from fedjax_bn.arguments.errors import CheckpointError
from fedjax_bn.run import train
from fedjax_bn.training import checkpoint


@pytest.mark.parametrize(("latest", "selected"), [(6, 4), (6, 6)])
def test_a_finished_run_keeps_its_last_round_and_the_selected_one(tmp_path, latest, selected):
    names = [f"latest/{latest}", "latest/4", f"selected/{selected}"]
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
    checkpoint.delete_earlier(tmp_path)
    assert runs.steps(tmp_path) == [6] * (latest != selected)
    assert runs.steps(tmp_path, "selected") == [selected]


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
    tmp_path, monkeypatch, capfd, damage
):
    straight = runs.finished(tmp_path / "straight")
    runs.install(monkeypatch)
    (straight / "summary.json").unlink()
    newest = straight / "checkpoints" / "selected" / "6"  # its last round too
    damage(newest)
    before = runs.files(straight)
    monkeypatch.setattr(train, "open_rounds", lambda *_: pytest.fail("compiled"))
    with pytest.raises(CheckpointError, match="delete that folder and run again") as error:
        runs.run(straight)
    assert str(newest) in str(error.value)
    assert "\n" not in str(error.value)
    assert runs.files(straight) == before
    assert "Traceback" not in capfd.readouterr().err
