"""PACS from small trees and lists that the tests write, and the real images where they are."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedjax_bn.data.pixels.decode import decode
from fedjax_bn.data.sets import image_folders
from fedjax_bn.data.source import VALIDATION
from trees import assert_in_place, write_tree

PACS = image_folders.IMAGE_FOLDERS["pacs"]
DOMAINS, CLASSES = tuple(PACS.domains), tuple(PACS.classes)
PUBLISHED = "Train val splits and h5py files pre-read"


def write_lists(root: Path, folder: str = "splits", suffix: str = ".jpg", first: int = 1) -> None:
    """The first two images of each class train, the third is for crossval, all are for test."""
    (root / folder).mkdir(parents=True)
    for domain in DOMAINS:
        for part, numbers in (("train", (0, 1)), ("crossval", (2,)), ("test", (0, 1, 2))):
            lines = [
                f"{domain}/{name}/{k}{suffix} {label}\n"
                for k in numbers
                for label, name in enumerate(CLASSES, first)
            ]
            (root / folder / f"{domain}_{part}_kfold.txt").write_text("".join(lines))


@pytest.fixture
def tree(tmp_path) -> Path:
    root = write_tree(tmp_path / "pacs", DOMAINS, CLASSES, 3)
    write_lists(root)
    return root


def load(path: Path):
    return image_folders.load_image_folders(PACS, path, image_size=6, progress=False)


def replace(path: Path, old: str, new: str) -> None:
    """Changes the first appearance of a text in a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_lists_divide_into_training_and_validation_parts(tree):
    source = load(tree)
    assert source.name == "pacs"
    assert source.classes == CLASSES
    for pool in source.pools:
        assert pool.parts.tolist() == [0, 0, 1] * 7
    assert_in_place(source)
    assert all("expected" in note for note in source.notes)
    assert len(source.notes) == 4


def test_without_lists_there_are_no_parts(tmp_path):
    source = load(write_tree(tmp_path, DOMAINS, CLASSES))
    assert all(pool.parts is None for pool in source.pools)


@pytest.mark.parametrize("place", ["above", "beside"])
def test_the_authors_folders_are_found(tmp_path, place):
    root = write_tree(tmp_path / "kfold", DOMAINS, CLASSES, 3)
    write_lists(tmp_path if place == "above" else root, PUBLISHED)
    assert load(tmp_path).pools[0].parts.tolist() == [0, 0, 1] * 7


def test_images_of_another_format_than_in_the_lists_are_found(tmp_path):
    root = write_tree(tmp_path, DOMAINS, CLASSES, 3, suffix=".bmp")
    write_lists(root)
    assert load(root).pools[3].parts.tolist() == [0, 0, 1] * 7


def test_labels_that_count_from_zero_are_refused(tmp_path):
    root = write_tree(tmp_path, DOMAINS, CLASSES, 3)
    write_lists(root, first=0)
    with pytest.raises(ValueError, match=r"photo_train_kfold\.txt"):
        load(root)


@pytest.mark.parametrize("part", ["train", "crossval"])
def test_labels_that_are_not_the_folders_are_named(tree, part):
    path = tree / "splits" / f"cartoon_{part}_kfold.txt"
    k = 2 if part == "crossval" else 0
    replace(path, f"cartoon/horse/{k}.jpg 5", f"cartoon/horse/{k}.jpg 6")
    replace(path, f"cartoon/dog/{k}.jpg 1", f"cartoon/dog/{k}.jpg 2")
    with pytest.raises(ValueError, match="_kfold") as error:
        load(tree)
    assert f"cartoon/dog/{k}.jpg 2 (not 1), cartoon/horse/{k}.jpg 6 (not 5)" in str(error.value)


def test_the_published_slips_are_kept_and_noted(tmp_path):
    root = write_tree(tmp_path, DOMAINS, CLASSES, 3)
    for number, k in ((225, 0), (248, 1), (249, 2)):
        image = root / "art_painting" / "dog" / f"{k}.png"
        image.rename(image.with_name(f"pic_{number}.png"))
    write_lists(root)
    for part in ("train", "crossval", "test"):
        path = root / "splits" / f"art_painting_{part}_kfold.txt"
        lines = [line for line in path.read_text().splitlines() if "/dog/" not in line]
        dogs = {"train": [], "crossval": ["225.jpg 0", "248.jpg 1", "248.jpg 1"]}.get(
            part, ["225.jpg 1", "248.jpg 1", "249.jpg 1"]
        )
        path.write_text("\n".join([f"art_painting/dog/pic_{dog}" for dog in dogs] + lines))
    source = load(root)
    assert source.pools[1].parts[:3].tolist() == [1, 1, 1]
    assert source.pools[1].labels[:3].tolist() == [0, 0, 0]
    assert source.notes[:2] == (
        "pacs, art_painting: listed twice, used once: pic_248.png",
        "pacs, art_painting: in no list, in data.split=official for validation: pic_249.png",
    )
    assert source.pools[1].parts[2] == VALIDATION


def test_listed_images_that_are_missing_are_named_up_to_ten(tree):
    for name in CLASSES[:6]:
        for k in range(2):
            (tree / "sketch" / name / f"{k}.png").unlink()
    with pytest.raises(FileNotFoundError, match="12") as error:
        load(tree)
    assert "sketch_train_kfold.txt" in str(error.value)
    assert "and 2 more" in str(error.value)
    assert str(error.value).count(".jpg") == 10


def test_a_missing_list_is_named(tree):
    (tree / "splits" / "cartoon_crossval_kfold.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"cartoon_crossval_kfold\.txt"):
        load(tree)


def test_an_image_in_both_lists_is_an_error(tree):
    path = tree / "splits" / "photo_crossval_kfold.txt"
    path.write_text(path.read_text() + "photo/dog/0.jpg 1\n")
    with pytest.raises(ValueError, match=r"0\.png"):
        load(tree)


@pytest.mark.parametrize("content", [b"photo/dog/0.jpg\n\nphoto/dog/1.jpg one\n", b"\xff\xfe\x00"])
def test_lists_of_another_form_are_named(tree, content):
    path = tree / "splits" / "photo_train_kfold.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        load(tree)


def test_the_real_images_have_the_published_counts_and_lists(shared, monkeypatch):
    def blank(files, size, **options):
        return np.zeros((len(files), size, size, 3), np.uint8), ()

    monkeypatch.setattr("fedjax_bn.data.sets.folders.decode", blank)
    source = image_folders.load_image_folders(PACS, shared / "data" / "pacs", image_size=1)
    assert {pool.name: len(pool.labels) for pool in source.pools} == PACS.counts
    assert [np.bincount(pool.parts).tolist() for pool in source.pools] == [
        [1499, 171],
        [1840, 208],
        [2107, 237],
        [3531, 398],
    ]
    assert len(source.notes) == 2
    for pool in source.pools:
        names = [name.split("/")[1] for name in pool.names]
        assert names == [CLASSES[label] for label in pool.labels]


def test_real_images_are_decoded_as_pillow_does(shared, tmp_path):
    root = shared / "data" / "pacs"
    files = sorted((root / "sketch" / "house").glob("*.jpg"))
    for size in (128, 40):
        images, _ = decode(files, size, root=root, cache=tmp_path, progress=False)
        for file, image in zip(files, images, strict=True):
            with Image.open(file) as original:
                resized = original.convert("RGB").resize((size, size), Image.BILINEAR)
            np.testing.assert_array_equal(image, np.asarray(resized))
