"""Decoding and its cache: pixels as Pillow's, faults named, nothing half-written; and tiles."""

import errno
import io
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image

from fedjax_bn.data.pixels.decode import FORMATS, cut, decode, open_image, put_together, tile_places
from fedjax_bn.engine.inputs import UNLABELLED

RNG = np.random.default_rng(0)


def write_image(path: Path, mode: str = "RGB", size: tuple[int, int] = (12, 9)) -> Path:
    """A random image of the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = 4 if "A" in mode else 3
    pixels = RNG.integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


@pytest.fixture
def files(tmp_path) -> list[Path]:
    return [write_image(tmp_path / "set" / f"{k:03}.bmp") for k in range(5)]


def pillow(path: Path, size: int) -> np.ndarray:
    """The transform of DomainBed and FedBN, in Pillow's own words."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((size, size), Image.BILINEAR))


def kept_in(cache: Path) -> list[Path]:
    """What the cache holds; locks, which are empty and stay, do not count."""
    assert all(not lock.stat().st_size for lock in cache.rglob("*.lock"))
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def load(files: list[Path], size: int = 8, cache: Path | None = None):
    return decode(files, size, root=files[0].parent, cache=cache, progress=False)


@pytest.mark.parametrize("cached", [False, True])
def test_pixels_are_pillows_in_the_order_of_the_files(tmp_path, cached):
    files = [write_image(tmp_path / "set" / f"{k}.png") for k in range(50)][::-1]
    write_image(files[0], size=(7, 7))  # which is not resampled
    images, notes = load(files, 7, tmp_path / "cache" if cached else None)
    np.testing.assert_array_equal(images, [pillow(file, 7) for file in files])
    assert images.dtype == np.uint8
    assert isinstance(images, np.memmap) == cached
    assert notes == ()


def test_other_modes_are_converted(tmp_path):
    modes = {"L": "jpg", "CMYK": "jpg"} | dict.fromkeys(("RGBA", "LA", "P", "1"), "png")
    files = [write_image(tmp_path / f"{mode}.{kind}", mode) for mode, kind in modes.items()]
    images, _ = load(files)
    np.testing.assert_array_equal(images, [pillow(file, 8) for file in files])


def test_all_unreadable_files_are_named_in_one_sentence(tmp_path, files):
    whole = write_image(tmp_path / "whole.jpg", size=(64, 64)).read_bytes()
    root = files[0].parent
    contents = {"cut.jpg": whole[:-200], "empty.png": b"", "page.jpg": b"<html>not found</html>"}
    for name, content in contents.items():
        (root / name).write_bytes(content)
    names = [*contents, "gone.png"]
    with pytest.raises(ValueError, match="4 of 9 images") as error:
        load([*files, *(root / name for name in names)], cache=tmp_path / "cache")
    for name in names:
        assert str(root / name) in str(error.value)
    assert "\n" not in str(error.value)
    assert kept_in(tmp_path / "cache") == []


def count_reads(monkeypatch) -> list[bytes]:
    """The contents of the files that are decoded from now on."""
    seen = []

    def opened(content: bytes, *options):
        seen.append(content)
        return open_image(content, *options)

    monkeypatch.setattr("fedjax_bn.data.pixels.decode.open_image", opened)
    return seen


def test_the_cache_is_reused_also_when_the_files_have_moved(tmp_path, files, monkeypatch):
    first, _ = load(files, cache=tmp_path / "cache")
    seen = count_reads(monkeypatch)
    again, _ = load(files, cache=tmp_path / "cache")
    np.testing.assert_array_equal(again, first)
    shutil.move(tmp_path / "set", tmp_path / "elsewhere" / "set")
    load([tmp_path / "elsewhere" / "set" / file.name for file in files], cache=tmp_path / "cache")
    assert seen == []


@pytest.mark.parametrize("change", ["rename", "content", "exchange", "size", "order"])
def test_any_change_of_the_source_is_decoded_anew(tmp_path, files, monkeypatch, change):
    load(files, cache=tmp_path / "cache")
    seen = count_reads(monkeypatch)
    if change == "rename":
        files[0] = files[0].rename(files[0].with_name("new.bmp"))
    elif change == "content":
        stat = files[0].stat()
        write_image(files[0])  # other pixels of the same size and time
        os.utime(files[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "exchange":
        files[0].rename(files[0].with_name("x"))
        files[1].rename(files[0])
        files[0].with_name("x").rename(files[1])
    elif change == "order":
        files.reverse()
    size = 6 if change == "size" else 8
    images, _ = load(files, size, tmp_path / "cache")
    assert len(seen) == len(files)
    np.testing.assert_array_equal(images, [pillow(file, size) for file in files])


@pytest.mark.parametrize("size", [0, 500, 1089])
def test_a_cache_that_is_cut_off_is_made_again(tmp_path, files, size):
    expected = np.array(load(files, cache=tmp_path / "cache")[0])
    (path,) = (tmp_path / "cache").glob("*.npy")
    path.write_bytes(path.read_bytes()[:size])
    np.testing.assert_array_equal(load(files, cache=tmp_path / "cache")[0], expected)
    np.testing.assert_array_equal(np.load(path), expected)


@pytest.mark.parametrize("size", [100, 600, 1089])
def test_a_full_disk_in_the_middle_is_one_sentence_and_leaves_nothing(tmp_path, files, size):
    """5 images of 8x8x3 bytes after a header of 128 are 1088; two of notes follow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system refuses to write more into any file, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError, match=r"/cache .*data\.cache"):
            load(files, cache=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept_in(tmp_path / "cache") == []
    assert len(load(files, cache=tmp_path / "cache")[0]) == 5
    (whole,) = kept_in(tmp_path / "cache")
    assert np.load(whole).shape == (5, 8, 8, 3)


@pytest.mark.parametrize(
    ("place", "error", "decoded"),
    [
        ("fedjax_bn.data.pixels.decode.open_image", KeyboardInterrupt, 0),
        ("os.fsync", OSError(errno.EIO, "fault"), 5),
        ("shutil.disk_usage", OSError(errno.ENOSPC, "full"), 0),  # is noticed before
    ],
)
def test_no_file_is_left_after_an_interrupt_or_where_the_disk_does_not_take_it(
    tmp_path, files, monkeypatch, place, error, decoded
):
    seen = count_reads(monkeypatch)
    monkeypatch.setattr(place, Mock(side_effect=error))
    with pytest.raises(error if isinstance(error, type) else OSError):
        load(files, cache=tmp_path / "cache")
    assert len(seen) == decoded
    assert kept_in(tmp_path / "cache") == []


SLOW = """
import sys, time
from pathlib import Path
from fedjax_bn.data.pixels import decode
real = decode.open_image
def opened(*given):
    if sys.argv[2] == "hang":
        print("writing", flush=True)
        time.sleep(60)
    time.sleep(0.1)
    print("decoded", flush=True)
    return real(*given)
decode.open_image = opened
files = sorted(Path(sys.argv[1], "set").iterdir())
root = Path(sys.argv[1], "set")
images, _ = decode.decode(files, 8, root=root, cache=Path(sys.argv[1], "cache"), progress=False)
print("sum", images.sum(), flush=True)
"""


def start(folder: Path, mode: str) -> subprocess.Popen:
    command = [sys.executable, "-c", SLOW, str(folder), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_a_killed_process_left_is_never_read_and_written_anew(tmp_path, files):
    process = start(tmp_path, "hang")
    assert process.stdout.read(7) == "writing"
    process.kill()
    process.communicate()
    (partial,) = (tmp_path / "cache").glob("*.partial")
    images, _ = load(files, cache=tmp_path / "cache")
    np.testing.assert_array_equal(images, [pillow(file, 8) for file in files])
    assert not partial.exists()


def test_of_two_processes_one_decodes_and_both_read_the_same(tmp_path, files):
    outputs = [p.communicate() for p in [start(tmp_path, "slow") for _ in range(2)]]
    lines = [out.split("\n") for out, _ in outputs]
    assert sum(out.count("decoded") for out, _ in outputs) == len(files)
    expected = f"sum {sum(int(pillow(file, 8).sum()) for file in files)}"
    assert all(expected in line for line in lines)
    assert len(kept_in(tmp_path / "cache")) == 1


# Formats of files

GREY = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
RGB = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)


def encoded(image, kind: str, **options) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def read(tmp_path, content: bytes, **options):
    (tmp_path / "a.jpg").write_bytes(content)
    return decode([tmp_path / "a.jpg"], 8, root=tmp_path, progress=False, **options)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_formats_of_datasets_are_opened_whatever_the_files_are_called(tmp_path, kind):
    content = encoded(RGB, kind)
    with Image.open(io.BytesIO(content)) as expected:
        pixels = np.asarray(expected.convert("RGB"))
    np.testing.assert_array_equal(read(tmp_path, content)[0][0], pixels)


@pytest.mark.parametrize("kind", ["EPS", "PDF", "TGA"])
def test_other_formats_of_pillow_are_not_opened_and_start_no_program(tmp_path, monkeypatch, kind):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given: started.append(given))
    with pytest.raises(ValueError, match=r"a\.jpg .*JPEG, PNG"):
        read(tmp_path, encoded(RGB, kind))
    assert not started


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"P5 40000 40000 255\n", "1600000000 pixels"),
        (encoded(np.full((8, 8), 70_000, np.float32), "TIFF"), "of Pillow"),
        (encoded(np.full((8, 8), 70_000, np.int32), "TIFF"), "of Pillow"),
    ],
)
def test_too_many_pixels_and_numbers_without_a_white_are_refused(tmp_path, content, reason):
    with pytest.raises(ValueError, match=rf"a\.jpg .*{reason}"):
        read(tmp_path, content)


@pytest.mark.parametrize("options", [{}, {"tiffinfo": {262: 0}}])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_of_sixteen_bits_the_upper_eight_are_kept(tmp_path, kind, options):
    """Tag 262 of TIFF says that white is 0."""
    images, _ = read(tmp_path, encoded(GREY, kind, **options))
    grey = 255 - (GREY >> 8) if options and kind == "TIFF" else GREY >> 8
    np.testing.assert_array_equal(images[0], np.repeat(grey[..., None], 3, -1))


# Tiles

SIDES = st.integers(1, 24)


@given(SIDES, SIDES, SIDES, st.sampled_from([(), (3,), (2, 2)]), st.sampled_from([None, 255]))
def test_tiles_put_together_are_the_image(height, width, size, channels, fill):
    rng = np.random.default_rng(height * 24 + width)
    image = rng.integers(0, 255, (height, width, *channels), dtype=np.uint8)
    tiles, places = cut(image, size, fill)
    assert tiles.shape == (len(tile_places(height, width, size)), size, size, *channels)
    assert np.array_equal(put_together(tiles, places, (height, width)), image)
    masks, _ = cut(np.ones((height, width), np.uint8), size, UNLABELLED)
    assert (masks == 1).sum() == height * width  # each labelled pixel is in one tile
    assert (masks == UNLABELLED).sum() == masks.size - height * width


def test_the_last_tile_is_shifted_inside_and_a_small_image_is_padded_by_its_edge():
    tiles, places = cut(np.arange(5)[None].repeat(2, 0), 2)
    assert places.tolist() == [[0, 0], [0, 2], [0, 3]]
    assert tiles[:, 0].tolist() == [[0, 1], [2, 3], [3, 4]]
    masks, _ = cut(np.arange(5, dtype=np.uint8)[None].repeat(2, 0), 2, UNLABELLED)
    assert masks[:, 0].tolist() == [[0, 1], [2, 3], [UNLABELLED, 4]]
    assert cut(np.array([[7, 8]]), 3)[0].tolist() == [[[7, 8, 8]] * 3]
