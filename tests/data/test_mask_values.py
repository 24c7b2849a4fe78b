"""Files of masks in every form, and the classes of their values."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from fedjax_bn.data.masks.assemble import classes_of
from fedjax_bn.data.masks.mask_folders import open_mask
from fedjax_bn.engine.inputs import UNLABELLED

VALUES = np.array([[0, 1, 2], [2, 255, 0]], np.uint8)
COLOURS = [(0, 0, 0), (128, 0, 0), (0, 128, 0)] + [(9, 9, 9)] * 252 + [(224, 224, 192)]


def content(image, form: str, **how) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


def with_palette(values, colours) -> Image.Image:
    image = Image.fromarray(values)
    image.putpalette([channel for colour in colours for channel in colour])
    return image


FILES = {
    **{f"grey {form}": content(VALUES, form) for form in ("PNG", "GIF", "PPM", "TIFF", "BMP")},
    "RGB": content(np.stack([VALUES] * 3, -1), "PNG"),
    "transparent": content(np.stack([VALUES] * 3 + [255 - VALUES], -1), "PNG"),
    "grey and transparent": content(np.stack([VALUES, 255 - VALUES], -1), "PNG"),
    "16 bits": content(VALUES.astype(np.uint16), "PNG"),
    "bytes in 16 bits": content(VALUES.astype(np.uint16) * 257, "TIFF"),
    # Its indices are 255 less than the greys that viewers show.
    "palette of greys": content(
        with_palette(255 - VALUES, [(255 - k,) * 3 for k in range(256)]), "PNG"
    ),
    "palette": content(with_palette(VALUES, COLOURS), "PNG"),
    "palette TIFF": content(with_palette(VALUES, COLOURS), "TIFF"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_mask_is_read_as_it_is_stored(name):
    assert np.array_equal(np.asarray(open_mask(FILES[name])), VALUES)


@pytest.mark.parametrize("form", ["PNG", "GIF", "PPM", "TIFF", "BMP"])
def test_a_mask_of_one_bit_is_black_and_white(form):
    image = Image.fromarray(VALUES == 2)
    assert image.mode == "1"
    assert np.array_equal(np.asarray(open_mask(content(image, form))), 255 * (VALUES == 2))


def test_jpeg_is_black_and_white():
    threshold = np.repeat(np.array([[127, 128]], np.uint8), 16, 0).repeat(16, 1)
    mask = np.asarray(open_mask(content(threshold, "JPEG", quality=100)))
    assert mask[0].tolist() == [0] * 16 + [255] * 16


PAGES = [Image.fromarray(VALUES)] * 3


@pytest.mark.parametrize(
    ("file", "culprit"),
    [
        (content(PAGES[0], "TIFF", save_all=True, append_images=PAGES[1:]), "3 frames"),
        (content(np.dstack([VALUES, VALUES, VALUES[::-1]]), "PNG"), "RGB"),
        (content(np.full((2, 2), 300, np.uint16), "PNG"), "255"),
        (content(np.zeros((2, 2), np.float32), "TIFF"), "F of Pillow"),
    ],
)
def test_what_has_no_class_is_refused(file, culprit):
    with pytest.raises(ValueError, match=culprit):
        open_mask(file)


@pytest.mark.parametrize("tag", range(1, 9))
def test_a_mask_is_turned_by_its_exif_as_an_image_is(tag):
    exif = Image.Exif()
    exif[274] = tag
    mask = open_mask(content(VALUES, "PNG", exif=exif))
    image = Image.fromarray(VALUES)
    image.getexif()[274] = tag
    assert np.array_equal(np.asarray(mask), np.asarray(ImageOps.exif_transpose(image)))
    stored = open_mask(content(VALUES, "PNG", exif=exif), orientation="stored")
    assert np.array_equal(np.asarray(stored), VALUES)


def classes(*values, names=(), owners=None):
    """`classes_of` masks with these sets of values, by default each in a domain of its own."""
    present = np.array([np.isin(np.arange(256), list(members)) for members in values])
    files = [f"{k}.png" for k in range(len(values))]
    return classes_of(present, owners or files, files, names)


@pytest.mark.parametrize(
    ("domains", "names", "expected", "note"),
    [
        ([{0, 255}, {0}], (), {0: 0, 255: 1}, "0 background, 255 foreground"),
        ([{0, 200}], ("rest=0", "cell=200"), {0: 0, 200: 1}, "0 rest, 200 cell"),
        ([{0, 1, 255}], (), {0: 0, 1: 1, 255: 255}, "1 foreground, 255 without a label"),
        ([{0, 1, 2}, {0, 2, 255}], (), {0: 0, 1: 1, 2: 2, 255: 255}, "2 2, 255 without a label"),
        ([{0, 2}], ("a", "b", "c"), {0: 0, 2: 2}, "0 a, 2 c"),
        ([{0, 2, 255}], ("a", "b", "c"), {0: 0, 2: 2, 255: 255}, "2 c, 255 without a label"),
        ([{0, 128, 255}], ("a=255", "disc=128", "cup=0"), {0: 2, 128: 1, 255: 0}, "0 cup, 128 d"),
        ([{0, 1, 2}], ("a=0", "b=1+2"), {0: 0, 1: 1, 2: 1, 9: 255}, "1 b, 2 b"),
    ],
)
def test_values_become_classes(domains, names, expected, note):
    found, table, about = classes(*domains, names=names)
    assert {value: int(table[value]) for value in expected} == expected
    assert note in about
    assert len(found) == 1 + max(n for n in expected.values() if n != UNLABELLED)
    assert not names or found == tuple(name.partition("=")[0] for name in names)


@pytest.mark.parametrize(
    ("domains", "names", "culprit"),
    [
        ([{0}, {0}], (), "0.png"),
        ([{0, 1, 2}, {0, 7}], ("a", "b", "c"), "1.png has the value 7,"),
        ([{0, 1}, {0, 1, 9}], ("a=0", "b=1"), "1.png has the value 9,"),
        ([{0, 255}], ("a", "b", "c"), "0.png"),
        ([{0, 255}, {0, 1}], (), "0.png"),
        ([{0, 1}], ("vessel",), r"data\.classes=vessel"),
        ([{0, 1}], ("a", "a"), r"data\.classes=a,a"),
        ([{0, 1}], ("a=0", "b"), r"data\.classes=a=0,b"),
        ([{0, 1}], ("a=0", "b=0+1"), r"data\.classes=a=0,b=0\+1"),
        ([{0, 1}], ("a=0", "b=300"), r"data\.classes=a=0,b=300"),
    ],
)
def test_values_that_are_no_classes_are_named_with_their_file(domains, names, culprit):
    with pytest.raises(ValueError, match=culprit):
        classes(*domains, names=names)


def test_255_is_unlabelled_in_a_domain_that_has_it_beside_a_class():
    with pytest.raises(ValueError, match=r"1\.png"):
        classes({0, 1}, {0, 255}, owners=["a", "a"])
    assert classes({0, 1, 255}, {0, 255}, owners=["a", "a"])[1][255] == UNLABELLED
