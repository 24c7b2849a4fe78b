"""A damaged file gives what was in it, or one error message."""

import io
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedjax_bn.data.pixels.decode import decode
from fedjax_bn.data.sets import abide, files, npz

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (6, 5, 5, 3), np.uint8)


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, a__images=BYTES, a__labels=np.arange(6) % 2, classes=np.array(["x", "y"]))
    return file.getvalue()


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(BYTES[0]).save(file, kind)
    return file.getvalue()


def decoded(path):
    return decode([path], 8, root=path.parent, progress=False)


CASES = {
    "a.npz": (archive(), npz.load_npz),
    "table.csv": (
        b'FILE_ID,SITE_ID,DX_GROUP\na,NYU,1\nb,"N,Y",2\n',
        lambda path: abide._read_table(path.parent),
    ),
    "list.txt": (b"a/b.jpg 1\nc d.png 2\n", files.read_list),
    "a.jpg": (picture("JPEG"), decoded),
    "b.jpg": (picture("TIFF"), decoded),
    "c.jpg": (picture("WEBP"), decoded),
}
EXTREME = (b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\n", b'"')


@st.composite
def damaged(draw, raw: bytes) -> bytes:
    """Some bytes replaced, left out or put in, or the end cut off."""
    raw = bytearray(raw)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(raw)))
        new = draw(st.one_of(st.binary(max_size=8), st.sampled_from(EXTREME)))
        gone = draw(st.sampled_from([0, len(new), len(new), 1, 8, len(raw)]))
        raw[place : place + gone] = new
    return bytes(raw)


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path, name):
    raw, read = CASES[name]
    path = tmp_path / name

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(damaged(raw))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        with suppress(ValueError, FileNotFoundError):
            read(path)
            return
        with pytest.raises((ValueError, FileNotFoundError), match=r"\A.{10,1500}\Z") as caught:
            read(path)
        assert not isinstance(caught.value, UnicodeError)

    path.write_bytes(raw)
    read(path)
    check()
