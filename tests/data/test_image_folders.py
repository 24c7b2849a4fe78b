"""Rows of the table of image folders, from small trees in the forms in which they are published."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedjax_bn.data.pixels.decode import decode
from fedjax_bn.data.sets import image_folders
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION
from trees import assert_in_place, write_shade, write_tree

FOLDERS = image_folders.IMAGE_FOLDERS
NUMBERS = tuple(map(str, range(5)))
AUTHORS = ("CALTECH", "LABELME", "SUN", "PASCAL")  # VLCS' domains as its authors write them
COUNTS = {
    "digits_dg": [6000] * 4,
    "office_caltech10": [958, 1123, 157, 295],
    "officehome": [2427, 4365, 4439, 4357],
    "pacs": [1670, 2048, 2344, 3929],
    "vlcs": [1415, 2656, 3282, 3376],
}
# of datasets that lists divide: endings of lists, numbers of a class' images in them, first label
LISTS = {
    "pacs": {"train_kfold": (0, 1), "crossval_kfold": (2,), "test_kfold": (0, 1, 2)},
    "domainnet": {"train": (0, 1), "test": (2,)},
}
TEN = tuple(FOLDERS["domainnet"].classes)
OTHERS = {"pacs": (), "domainnet": ("airplane", "zigzag")}  # classes of the lists without images


def load(name, path, **options):
    return image_folders.load_image_folders(name, path, image_size=6, progress=False, **options)


def write_lists(name: str, root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for domain in FOLDERS[name].domains:
        for ending, numbers in LISTS[name].items():
            lines = [
                f"{domain}/{class_name}/{k}.jpg {label}\n"
                for label, class_name in enumerate(sorted((*FOLDERS[name].classes, *OTHERS[name])))
                for k in numbers
            ]
            (root / f"{domain}_{ending}.txt").write_text("".join(lines))


@pytest.fixture
def trees(tmp_path) -> dict[str, Path]:
    """Datasets with lists, in the root of one and in a folder of the other."""
    roots = {}
    for name, folder in (("pacs", "splits"), ("domainnet", ".")):
        row = FOLDERS[name]
        roots[name] = write_tree(tmp_path / name / "data", row.domains, [*row.classes], 3)
        write_lists(name, roots[name] / folder)
    return roots


@pytest.mark.parametrize("name", COUNTS)
def test_domains_and_classes_are_in_the_published_order_and_counts_are_expected(tmp_path, name):
    source = load(name, write_tree(tmp_path, FOLDERS[name].domains, [*FOLDERS[name].classes], 1))
    assert [pool.name for pool in source.pools] == list(FOLDERS[name].domains)
    assert source.classes == tuple(FOLDERS[name].classes)
    expected = [int(note.split("expected ")[1].split(":")[0]) for note in source.notes]
    assert expected == COUNTS[name]
    assert_in_place(source)
    assert all(pool.parts is None for pool in source.pools)


def test_classes_are_numbered_as_in_domainbed_and_fedbns_code():
    home = list(FOLDERS["officehome"].classes)
    assert (len(home), home) == (65, sorted(home))
    assert tuple(FOLDERS["office_caltech10"].classes) == (
        *("back_pack", "bike", "calculator", "headphones", "keyboard"),
        *("laptop_computer", "monitor", "mouse", "mug", "projector"),
    )
    assert FOLDERS["office_caltech10"].mean == (0.0, 0.0, 0.0)
    assert FOLDERS["office_caltech10"].std == (1.0, 1.0, 1.0)


def test_the_form_of_office_31_and_names_of_caltech_256_serve_without_other_classes(tmp_path):
    row = FOLDERS["office_caltech10"]
    write_tree(tmp_path, [f"{domain}/images" for domain in row.domains], [*row.classes])
    for domain in list(row.domains)[:3]:
        write_shade(tmp_path / domain / "images" / "stapler" / "0.png", 1)
        (tmp_path / domain / "interest_points").mkdir()
    for usual, name in (("bike", "touring-bike"), ("laptop_computer", "laptop-101")):
        place = tmp_path / "caltech" / "images"
        (place / usual).rename(place / name)
    source = load("office_caltech10", tmp_path)
    assert_in_place(source)
    assert all(name.split("/")[1] == "images" for name in source.pools[0].names)
    assert any(note.startswith("left out 3 files or folders") for note in source.notes)


@pytest.mark.parametrize("train", ["train", "TRAIN"])
def test_vlcs_authors_form_divides_by_folder(tmp_path, train):
    for part, count in ((train, 3), ("crossval", 1), ("test", 2), ("full", 6)):
        write_tree(tmp_path, [f"{domain}/{part}" for domain in AUTHORS], NUMBERS, count)
    source = load("vlcs", tmp_path)
    for pool in source.pools:
        np.testing.assert_array_equal(pool.parts, [0] * 15 + [1] * 5 + [2] * 10)
        assert not any("/full/" in name for name in pool.names)
    assert_in_place(source)


def test_train_and_val_of_digits_dg_become_parts_and_a_class_may_be_rare_but_not_absent(tmp_path):
    domains = FOLDERS["digits_dg"].domains
    for part, count in (("train", 2), ("val", 1)):
        write_tree(tmp_path, [f"{name}/{part}" for name in domains], "123456789", count)
    for name in list(domains)[:3]:
        write_shade(tmp_path / name / "train" / "0" / "0.png", 0)
    with pytest.raises(ValueError, match="'syn'"):
        load("digits_dg", tmp_path)
    write_shade(tmp_path / "syn" / "train" / "0" / "0.png", 0)
    for pool in load("digits_dg", tmp_path).pools:
        np.testing.assert_array_equal(pool.parts, [TRAIN] * 19 + [VALIDATION] * 9)


def test_lists_divide_a_domain(trees):
    source = load("pacs", trees["pacs"])
    for pool in source.pools:
        assert pool.parts.tolist() == [TRAIN, TRAIN, VALIDATION] * 7
    assert_in_place(source)
    source = load("domainnet", trees["domainnet"])
    for pool in source.pools:
        twice = [label for label in range(10) for _ in "ab"]
        assert pool.labels.tolist() == twice + list(range(10))
        assert pool.parts.tolist() == [TRAIN] * 20 + [TEST] * 10
    assert_in_place(source)


@pytest.mark.parametrize("place", ["above", "beside"])
def test_the_authors_folders_of_lists_are_found(trees, place):
    lists = trees["pacs"] / "splits"
    around = trees["pacs"].parent if place == "above" else trees["pacs"]
    lists.rename(around / "Train val splits and h5py files pre-read")
    source = load("pacs", trees["pacs"].parent)
    assert source.pools[0].parts.tolist() == [TRAIN, TRAIN, VALIDATION] * 7


def test_any_classes_of_domainnets_lists_may_be_chosen_and_are_numbered_in_that_order(trees):
    source = load("domainnet", trees["domainnet"], classes=("zebra", "bird"))
    assert source.classes == ("zebra", "bird")
    pool = source.pools[1]
    names = [name.split("/")[1] for name in pool.names]
    assert names == [source.classes[label] for label in pool.labels]
    for classes in (("bird", "brid"), ("bird", "bird")):
        with pytest.raises(ValueError, match=r"data\.classes"):
            load("domainnet", trees["domainnet"], classes=classes)
    write_tree(trees["domainnet"], FOLDERS["domainnet"].domains, OTHERS["domainnet"], 3)
    source = load("domainnet", trees["domainnet"], classes=("all",))
    assert source.classes == ("airplane", *TEN, "zigzag")


def test_an_image_in_no_list_validates_in_pacs_and_is_left_out_of_domainnet(trees):
    for name, domain, class_name in (("pacs", "photo", "dog"), ("domainnet", "real", "bird")):
        write_shade(trees[name] / domain / class_name / "9.png", 0)
        source = load(name, trees[name])
        assert any("9.png" in note for note in source.notes)
        (pool,) = (pool for pool in source.pools if pool.name == domain)
        parts = pool.parts[[file.endswith("9.png") for file in pool.names]]
        assert parts.tolist() == ([VALIDATION] if name == "pacs" else [])


@pytest.mark.parametrize(
    ("name", "ending", "line", "part"),
    [
        ("pacs", "splits/photo_crossval_kfold.txt", "photo/dog/0.jpg 1", VALIDATION),
        ("domainnet", "sketch_test.txt", "sketch/tiger/0.png 5", TEST),
    ],
)
def test_an_image_in_two_lists_never_trains(trees, name, ending, line, part):
    path = trees[name] / ending
    path.write_text(path.read_text() + line + "\n")
    source = load(name, trees[name])
    image = line.rpartition(".")[0]
    (pool,) = (pool for pool in source.pools if pool.name == image.split("/")[0])
    assert pool.parts[[file.startswith(image) for file in pool.names]].tolist() == [part]
    assert any(f"{pool.name}: 1 lines repeat" in note for note in source.notes)


@pytest.mark.parametrize(
    ("name", "domain", "class_name"), [("pacs", "sketch", "horse"), ("domainnet", "real", "whale")]
)
def test_listed_images_and_lists_that_are_missing_are_named(trees, name, domain, class_name):
    for k in range(2):
        (trees[name] / domain / class_name / f"{k}.png").unlink()
    with pytest.raises(FileNotFoundError, match=f"{domain}/{class_name}/0.*{class_name}/1"):
        load(name, trees[name])
    lists = sorted(trees[name].rglob("*.txt"))
    next(path for path in lists if path.name.startswith(f"{domain}_train")).unlink()
    with pytest.raises(FileNotFoundError, match=f"{domain}_train"):
        load(name, trees[name])
    for path in trees["domainnet"].glob("*.txt"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"ai\.bu\.edu/M3SDA"):
        load("domainnet", trees["domainnet"])


@pytest.mark.parametrize("content", [b"photo/dog/0.jpg\n\nphoto/dog/1.jpg one\n", b"\xff\xfe\x00"])
def test_lists_of_another_form_are_named(trees, content):
    path = trees["pacs"] / "splits" / "photo_train_kfold.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        load("pacs", trees["pacs"])


def test_a_class_that_a_domain_lacks_is_named(trees):
    for path in trees["domainnet"].glob("infograph_*.txt"):
        lines = [line for line in path.read_text().splitlines(True) if "/teapot/" not in line]
        path.write_text("".join(lines))
    with pytest.raises(ValueError, match=r"infograph.*teapot"):
        load("domainnet", trees["domainnet"])


def test_the_real_images_of_pacs_have_the_published_counts_and_lists(shared, monkeypatch):
    def blank(files, size, **options):
        return np.zeros((len(files), size, size, 3), np.uint8), ()

    monkeypatch.setattr("fedjax_bn.data.sets.folders.decode", blank)
    source = load("pacs", shared / "data" / "pacs")
    assert {pool.name: len(pool.labels) for pool in source.pools} == FOLDERS["pacs"].counts
    assert [np.bincount(pool.parts).tolist() for pool in source.pools] == [
        [1499, 171],
        [1840, 208],
        [2107, 237],
        [3531, 398],
    ]
    for pool in source.pools:
        names = [name.split("/")[1] for name in pool.names]
        assert names == [source.classes[label] for label in pool.labels]


def test_real_images_are_decoded_as_pillow_does(shared, tmp_path):
    root = shared / "data" / "pacs"
    files = sorted((root / "sketch" / "house").glob("*.jpg"))
    for size in (128, 40):
        images, _ = decode(files, size, root=root, cache=tmp_path, progress=False)
        for file, image in zip(files, images, strict=True):
            with Image.open(file) as original:
                resized = original.convert("RGB").resize((size, size), Image.BILINEAR)
            np.testing.assert_array_equal(image, np.asarray(resized))
