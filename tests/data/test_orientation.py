"""EXIF's orientation: every path gives upright pictures, and boxes where viewers show them."""

import csv
import io
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import runs
from boxed import text
from fedjax_bn.data.labels import BOXES
from fedjax_bn.data.pixels.decode import decode, decode_image
from fedjax_bn.data.sets.box_folders import load_boxes
from fedjax_bn.models import MLP
from fedjax_bn.serving import folder

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
