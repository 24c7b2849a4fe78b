"""Image files are rasters of stated formats, sizes and numbers; anything else is refused."""

import io

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from fedjax_bn.data.pixels.decode import decode
from fedjax_bn.data.pixels.raster import FORMATS, open_image, open_raster

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


def test_postscript_starts_no_program(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given: started.append(given))
    with pytest.raises(ValueError, match=r"a\.jpg"):
        read(tmp_path, encoded(RGB, "EPS"))
    assert not started


@pytest.mark.parametrize("kind", ["PDF", "ICO", "TGA", "SPIDER"])
def test_other_formats_of_pillow_are_not_opened(kind):
    image = Image.fromarray(RGB).convert("F") if kind == "SPIDER" else Image.fromarray(RGB)
    with pytest.raises(ValueError, match="JPEG, PNG"):
        open_raster(encoded(image, kind))


@pytest.mark.parametrize("side", [12_000, 14_000, 40_000])
def test_all_images_above_one_stated_size_are_refused_in_one_way(tmp_path, side):
    """Pillow itself warns of 144 megapixels, and refuses 196; warnings are errors here."""
    header = b"P5 %d %d 255\n" % (side, side)
    with pytest.raises(ValueError, match=rf"{side} x {side} .*max_megapixels"):
        read(tmp_path, header)
    assert open_raster(header, max_megapixels=side**2 / 1e6).size == (side, side)


@pytest.mark.parametrize(
    ("image", "kind", "words"),
    [
        (np.full((8, 8), 255, np.float32), "TIFF", "F of Pillow"),
        (np.full((8, 8), 70_000, np.int32), "TIFF", "I of Pillow"),
        (np.ones((8, 8), np.float32), "PPM", "F of Pillow"),
    ],
)
def test_numbers_without_a_stated_white_are_refused_naming_the_file(tmp_path, image, kind, words):
    with pytest.raises(ValueError, match=rf"a\.jpg .*{words}"):
        read(tmp_path, encoded(image, kind))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_of_sixteen_bits_the_upper_eight_are_kept(tmp_path, kind):
    images, _ = read(tmp_path, encoded(GREY, kind))
    np.testing.assert_array_equal(images[0], np.repeat((GREY >> 8)[..., None], 3, -1))


def tiff(values: np.ndarray, bits: int, white_is_zero: bool = False) -> bytes:
    """A grey TIFF of one strip, its numbers packed from the highest bit on."""
    text = "".join(f"{value:0{bits}b}" for value in values.ravel())
    raw = bytes(int(text[k : k + 8], 2) for k in range(0, len(text), 8))
    raw = values.astype("<u2").tobytes() if bits == 16 else raw
    height, width = values.shape
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, int(not white_is_zero))]
    tags += [(273, 8), (277, 1), (278, height), (279, len(raw))]
    entries = b"".join(
        tag.to_bytes(2, "little") + b"\x04\0\x01\0\0\0" + value.to_bytes(4, "little")
        for tag, value in tags
    )
    start = (8 + len(raw)).to_bytes(4, "little")
    return b"II*\0" + start + raw + len(tags).to_bytes(2, "little") + entries + bytes(4)


@pytest.mark.parametrize(("bits", "white_is_zero"), [(16, False), (16, True), (12, False)])
def test_numbers_of_a_tiff_mean_what_its_tags_say(bits, white_is_zero):
    values = GREY >> (16 - bits)
    image, _ = open_image(tiff(values, bits, white_is_zero))
    grey = (values >> (bits - 8)).astype(np.uint8)
    expected = 255 - grey if white_is_zero else grey
    np.testing.assert_array_equal(np.asarray(image)[..., 1], expected)
