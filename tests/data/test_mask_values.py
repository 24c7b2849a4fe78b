"""Masks as they are stored: values that become classes, and orientation by EXIF."""

import csv
import io
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image, ImageOps

import runs
from boxed import text
from fedjax_bn.data.labels import BOXES
from fedjax_bn.data.masks.assemble import classes_of
from fedjax_bn.data.masks.mask_folders import open_mask
from fedjax_bn.data.pixels.decode import decode, decode_image
from fedjax_bn.data.sets.box_folders import load_boxes
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.models import MLP
from fedjax_bn.serving import folder

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


TAGS = tuple(range(1, 9))
WIDTH, HEIGHT = 40, 80
STORE = {  # the upright picture -> the rows that a camera stores with that tag
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}


def upright():
    """Black, with a white patch at the top left: x from 0 to 10, y from 0 to 40."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[:40, :10] = 255
    return pixels


def store(path: Path, tag: int, pixels: np.ndarray, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[274] = tag
    options = {"quality": 100, "subsampling": 0} if path.suffix == ".jpg" else options
    Image.fromarray(np.ascontiguousarray(STORE[tag](pixels))).save(path, exif=exif, **options)
    return path


@pytest.mark.parametrize("kind", [".jpg", ".png", ".webp", ".tif"])
def test_an_image_with_a_tag_is_the_upright_image(tmp_path, kind):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 3), np.uint8)
    pixels = pixels.repeat(8, 0).repeat(8, 1)
    files = [store(tmp_path / f"{tag}{kind}", tag, pixels, lossless=True) for tag in TAGS]
    plain, *found = decode(files, 16, root=tmp_path, progress=False)[0].astype(int)
    np.testing.assert_allclose(found, [plain] * 7, atol=12 if kind == ".jpg" else 2)


@pytest.mark.parametrize("kind", [".jpg", ".png", ".webp", ".tif"])
def test_stored_pixels_are_what_torchvision_reads(tmp_path, kind):
    files = [store(tmp_path / f"{tag}{kind}", tag, upright()) for tag in TAGS]
    how = {"root": tmp_path, "progress": False, "cache": tmp_path / "cache"}
    decode(files, 16, orientation="stored", **how)
    found, notes = decode(files, 16, orientation="stored", **how)  # from the cache
    for file, pixels in zip(files, found, strict=True):
        with Image.open(file) as image:
            expected = image.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(pixels, np.asarray(expected))
    left = ("images left as stored, against their EXIF orientation: 7",)
    assert notes == (() if kind == ".tif" else left)  # Pillow has turned TIFF


def test_a_tag_behind_the_pixels_of_a_png_is_read(tmp_path):
    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(STORE[6](upright()))).save(content, "PNG")
    tagged = store(tmp_path / "a.png", 6, upright()).read_bytes()
    at = tagged.index(b"eXIf") - 4
    chunk = tagged[at : at + 12 + int.from_bytes(tagged[at : at + 4], "big")]
    plain = content.getvalue()
    end = plain.index(b"IEND") - 4
    pixels, tag = decode_image(plain[:end] + chunk + plain[end:], 8)
    assert tag == 6
    np.testing.assert_array_equal(pixels, decode_image(tagged, 8)[0])


def yolo(root: Path, size, box) -> None:
    (x, y, w, h), (wide, high) = box, size
    row = f"0 {(x + w / 2) / wide} {(y + h / 2) / high} {w / wide} {h / high}"
    text(root / "labels/a.txt", row)


def coco(root: Path, size, box) -> None:
    images = [{"id": 1, "file_name": "a.jpg", "width": size[0], "height": size[1]}]
    boxes = [{"image_id": 1, "category_id": 1, "bbox": list(map(int, box))}]
    content = {"images": images, "categories": [{"id": 1, "name": "x"}], "annotations": boxes}
    text(root / "annotations/instances_train.json", content)


SHOWN = (WIDTH, HEIGHT), (0, 0, 10, 40)  # size and box as viewers show them


def stored_frame(tag: int):
    """Size and box as a program sees them that does not turn images."""
    pixels = STORE[tag](upright())[..., 0]
    rows, columns = np.nonzero(pixels)
    box = columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1
    return pixels.shape[::-1], box


@pytest.mark.parametrize("orientation", ["upright", "stored"])
@pytest.mark.parametrize(("write", "frame"), [(yolo, "used"), (coco, "used"), (coco, "other")])
@pytest.mark.parametrize("tag", TAGS)
def test_a_box_covers_its_pixels_whichever_frame_its_labels_state(
    tmp_path, write, frame, orientation, tag
):
    store(tmp_path / "images/a.jpg", tag, upright())
    # Where the tag does not exchange the sides, the size says nothing of the frame.
    is_stored = (orientation == "stored") != (frame == "other" and tag > 4)
    write(tmp_path, *(stored_frame(tag) if is_stored else SHOWN))
    how = {"image_size": 80, "progress": False, "orientation": orientation}
    source = load_boxes(tmp_path, **how)
    x1, y1, x2, y2 = np.round(source.pools[0].labels[BOXES][0, 0] * 80).astype(int)
    assert (x2 - x1) * (y2 - y1) == 400
    assert source.pools[0].images[0][y1:y2, x1:x2].mean() > 250
    notes = " ".join(source.notes)
    assert ("EXIF orientation" in notes) == (tag > 1)


def predicted(model: Path, data: Path, capsys) -> list[list[str]]:
    """The probabilities of each image of a folder."""
    assert runs.command("predict", "--model", str(model), "--data", str(data)) == 0
    return [row[2:] for row in csv.reader(io.StringIO(capsys.readouterr().out))][1:]


def test_predict_reads_images_as_the_training_of_its_model_did(tmp_path, capsys):
    rng = np.random.default_rng(0)
    like = jax.eval_shape(MLP(2).init, jax.random.key(0), np.zeros((1, 8, 8, 3), np.float32))
    variables = jax.tree.map(lambda leaf: rng.uniform(0.1, 1, leaf.shape).astype(leaf.dtype), like)
    about = {"form": folder.FORM, "library": "", "model": "MLP", "compute_dtype": "float32"}
    about |= {"method": "fedavg", "dataset": "folders", "round": 1, "classes": ["a", "b"]}
    about |= {"shape": [8, 8, 3], "dtype": "uint8", "mean": [0.5], "std": [0.5], "programs": {}}
    about |= {"adaptations": ["running"], "batch_size": 32, "masks": ""}
    for orientation in ("upright", "stored"):
        model = folder.About(**about, orientation=orientation)
        folder.write_served(tmp_path / orientation, model, variables, {})
    pixels = rng.integers(0, 256, (12, 8, 3), np.uint8)
    for tag in TAGS:
        store(tmp_path / f"tagged/{tag}.png", tag, pixels)
        (tmp_path / "plain").mkdir(exist_ok=True)
        rows = np.ascontiguousarray(STORE[tag](pixels))
        Image.fromarray(rows).save(tmp_path / f"plain/{tag}.png")
    upright = predicted(tmp_path / "upright", tmp_path / "tagged", capsys)
    assert len({tuple(row) for row in upright}) == 1
    plain = predicted(tmp_path / "upright", tmp_path / "plain", capsys)
    assert predicted(tmp_path / "stored", tmp_path / "tagged", capsys) == plain
