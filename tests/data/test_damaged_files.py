"""A damaged file gives what was in it, or one error that names it; none is unpickled."""

import gzip
import io

import numpy as np
import pytest

import runs
import scans
from fedjax_bn.data.masks.volumes import Slices, slices_of
from fedjax_bn.run.experiment.datasets import DATASETS


def archive(labels) -> bytes:
    content = io.BytesIO()
    np.savez(content, a__images=np.zeros((2, 4, 4, 3), np.uint8), a__labels=labels)
    return content.getvalue()


def read_npz(path):
    return DATASETS["npz"](runs.config(data__name="npz", data__path=str(path)))


class Call:
    """Asks whoever unpickles it to write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_an_array_of_objects_is_not_unpickled(tmp_path):
    (tmp_path / "a.npz").write_bytes(archive(np.array([Call(tmp_path / "called"), 1], object)))
    with pytest.raises(ValueError, match=r"a\.npz"):
        read_npz(tmp_path / "a.npz")
    assert not (tmp_path / "called").exists()


def test_a_volume_that_is_cut_off_is_named(tmp_path):
    pytest.importorskip("nibabel")
    path = scans.write_volume(tmp_path / "a.nii.gz", scans.voxels())
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(content[: len(content) // 2]))
    with pytest.raises(ValueError, match=str(path)):
        slices_of(path, Slices(16))
