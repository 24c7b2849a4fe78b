"""A damaged file gives what was in it, or one error that names it; none is unpickled."""

import gzip
import io
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import runs
import scans
from fedjax_bn.data.masks.assemble import open_mask
from fedjax_bn.data.masks.volumes import Slices, slices_of
from fedjax_bn.data.pixels.decode import decode
from fedjax_bn.run.experiment.datasets import DATASETS

BYTES = np.random.default_rng(0).integers(0, 256, (5, 5, 3), np.uint8)


def picture(kind: str) -> bytes:
    content = io.BytesIO()
    Image.fromarray(BYTES).save(content, kind)
    return content.getvalue()


def archive(labels) -> bytes:
    content = io.BytesIO()
    np.savez(content, a__images=np.zeros((2, 4, 4, 3), np.uint8), a__labels=labels)
    return content.getvalue()


def read_image(path):
    return decode([path], 8, root=path.parent, progress=False)


def read_npz(path):
    return DATASETS["npz"](runs.config(data__name="npz", data__path=str(path)))


CASES = {
    "a.jpg": (picture("JPEG"), read_image),
    "a.png": (picture("PNG"), read_image),
    "a.tif": (picture("TIFF"), read_image),
    "a.webp": (picture("WEBP"), read_image),
    "a.npz": (archive(np.array([0, 1])), read_npz),
}


@st.composite
def damaged(draw, raw: bytes) -> bytes:
    """Some bytes replaced, left out or put in, or the end cut off."""
    raw = bytearray(raw)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(raw)))
        put_in = draw(st.binary(max_size=8))
        taken_out = draw(st.sampled_from([0, len(put_in), 1, 8, len(raw)]))
        raw[place : place + taken_out] = put_in
    return bytes(raw)


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_or_named_in_one_line(tmp_path, name):
    raw, read = CASES[name]
    path = tmp_path / name

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(damaged(raw))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        with suppress(ValueError):
            read(path)
            return
        with pytest.raises(ValueError, match=rf"\A.*{name}.*\Z"):
            read(path)

    path.write_bytes(raw)
    read(path)
    check()


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


def test_a_mask_that_is_no_image_raises_an_error():
    with pytest.raises(ValueError, match="PNG"):
        open_mask(b"no image")


def test_a_volume_that_is_cut_off_is_named(tmp_path):
    pytest.importorskip("nibabel")
    path = scans.write_volume(tmp_path / "a.nii.gz", scans.voxels())
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(content[: len(content) // 2]))
    with pytest.raises(ValueError, match=str(path)):
        slices_of(path, Slices(16))
