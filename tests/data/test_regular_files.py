"""Metadata and arrays from outside: regular files of a stated size, checked before reading."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedjax_bn.data import regular_files
from fedjax_bn.data.boxes import bdd100k, own, per_image
from fedjax_bn.data.boxes.coco import COCO
from fedjax_bn.data.boxes.labelled import Slips
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.decode import decode
from fedjax_bn.data.regular_files import Refused, open_regular, read_text
from fedjax_bn.data.sets import abide, arrays, cifar10_c, digit_files
from fedjax_bn.data.sets.files import open_table, read_list
from fedjax_bn.data.sets.npz import read_archive
from fedjax_bn.training.availability import read_trace

SHORT = 600  # characters of a message, paths of tests included


def of_mnist_m(path: Path):
    (path.parent / "mnist_m_train").mkdir()
    return digit_files._mnist_m(path.parent)


def of_cifar(path: Path):
    return cifar10_c._read_cifar10(path.parent)


def of_table(path: Path):
    with open_table(path) as table:
        return table.fieldnames


def of_image(path: Path):
    return decode([path], 8, root=path.parent, progress=False)


def of_coco(path: Path):
    return COCO.find(path.parent, path.parent, Slips())


READERS = {
    "data.yaml": lambda path: per_image._class_names([path.parent]),
    "classes.json": of_coco,
    "a.xml": lambda path: per_image.VOC.find(path.parent, path.parent, Slips()),
    "rows.json": lambda path: list(bdd100k._read_rows(path)),
    "list.txt": read_list,
    "metadata.csv": of_table,
    "test_batch": of_cifar,
    "train_32x32.mat": lambda path: digit_files._read_mat(path, 0),
    "train-images-idx3-ubyte": lambda path: digit_files._read_idx(path, 3),
    "train-images-idx3-ubyte.gz": lambda path: digit_files._read_idx(path, 3),
    "usps.bz2": lambda path: digit_files._read_libsvm(path),
    "usps.h5": lambda path: digit_files._read_h5(path, "train"),
    "mnist_m_train_labels.txt": of_mnist_m,
    "a_rois_cc200.1D": lambda path: abide._read_subjects({"a": path}, {"a": ("x", "1")}, 1),
    "own.npz": read_archive,
    "trace.txt": lambda path: read_trace(str(path), 2),
    "trace.npz": lambda path: read_trace(str(path), 2),
    "image.jpg": of_image,
}


@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_an_endless_device_is_refused_at_once_in_one_sentence(tmp_path, name, kind):
    if kind == "a device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}.*{kind}") as caught:
        READERS[name](tmp_path / name)
    assert len(str(caught.value).splitlines()[0]) == len(str(caught.value)) < SHORT


@pytest.mark.parametrize(
    "name",
    ["data.yaml", "classes.json", "a.xml", "list.txt", "metadata.csv", "test_batch", "trace.txt"],
)
def test_a_file_above_the_stated_limit_is_refused_before_it_is_read(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**40)  # which takes no space
    with pytest.raises(ValueError, match=r"1,099,511,627,776 bytes, and at most [\d,]+ of such"):
        READERS[name](tmp_path / name)


def test_a_regular_file_is_read_whole_and_a_link_to_it(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert read_text(tmp_path / "link") == "one\ntwo\n"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "b", 1)
    with pytest.raises(Refused, match="at most 5 of such") as caught:
        read_text(tmp_path / "a", 5)
    assert str(tmp_path) not in caught.value.strerror


def bomb(path: Path) -> Path:
    np.savez_compressed(
        path, a__images=np.zeros((2000, 16, 16, 3), np.uint8), a__labels=np.zeros(2000, np.int32)
    )
    return path


def test_an_archive_that_unpacks_to_far_more_than_it_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_SMALL", 2**20)
    read = []
    monkeypatch.setattr(np.lib.format, "read_array", lambda *a, **k: read.append(a))
    path = bomb(tmp_path / "a.npz")
    for reader in (read_archive,):
        with pytest.raises(ValueError, match=r"unpack to 1,5\d\d,000, more than 200 times"):
            reader(path)
    assert not read


def test_an_archive_of_few_bytes_or_written_without_compression_is_read(tmp_path, monkeypatch):
    assert len(read_archive(bomb(tmp_path / "a.npz"))[0]["a"][""].labels) == 2000
    monkeypatch.setattr(arrays, "_SMALL", 2**20)
    with np.load(tmp_path / "a.npz") as there:
        np.savez(tmp_path / "b.npz", **there)
    assert len(read_archive(tmp_path / "b.npz")[0]["a"][""].labels) == 2000


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (np.zeros((4, 2, 2, 3), int), np.zeros(4, int), "a__images have dtype int64"),
        (np.zeros((4, 2, 2, 3), np.uint8), np.zeros(3, int), "4 images but 3 labels"),
        (np.zeros((0, 2, 2, 3), np.uint8), np.zeros(0, int), "a__images is empty"),
    ],
)
def test_headers_are_checked_before_any_array_is_read(tmp_path, monkeypatch, images, labels, said):
    np.savez(tmp_path / "a.npz", a__images=images, a__labels=labels)
    monkeypatch.setattr(np.lib.format, "read_array", None)
    with pytest.raises(ValueError, match=said):
        read_archive(tmp_path / "a.npz")


def test_compressed_files_of_other_forms_are_bounded_alike(tmp_path, monkeypatch):
    import gzip

    from scipy.io import savemat

    monkeypatch.setattr(arrays, "_SMALL", 2**16)
    header = bytes([0, 0, 8, 3]) + np.array([1000, 28, 28], ">u4").tobytes()
    packed = tmp_path / "train-images-idx3-ubyte.gz"
    packed.write_bytes(gzip.compress(header + bytes(784_000)))
    with pytest.raises(ValueError, match="unpack to 784,000, more than 200 times"):
        digit_files._read_idx(packed, 3)
    images = np.zeros((32, 32, 3, 200), np.uint8)
    savemat(tmp_path / "a.mat", {"X": images, "y": np.ones(200)}, do_compression=True)
    with pytest.raises(ValueError, match="more than 200 times"):
        digit_files._read_mat(tmp_path / "a.mat", 1)


def boxes_in(root: Path, **changes) -> Path:
    (root / "images").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(root / "images/a.png")
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 8, "height": 8}],
        "categories": [{"id": 1, "name": "x"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 4, 4]}],
    }
    for key, change in changes.items():
        content[key][0] |= change
    (root / "instances.json").write_text(json.dumps(content))
    return root


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": {"file_name": "n" * 5000}}, r"row 1: 'file_name' 'n+\.\.\.n+' has 5,000 char"),
        ({"images": {"file_name": "n" * 250 + ".png"}}, "labelled images are not in"),
        ({"images": {"file_name": "é" * 200}}, "has 200 characters"),
        ({"images": {"file_name": "a/" * 3000 + "b"}}, "more than a file's name can have"),
        ({"annotations": {"category_id": 10**4000}}, "is of category"),
        ({"annotations": {"image_id": 10**4000}}, "is of image"),
        ({"annotations": {"category_id": 7, "image_id": 1}}, "is of category 7"),
    ],
)
def test_long_names_and_numbers_in_a_coco_file_are_one_short_sentence(tmp_path, changes, said):
    root = boxes_in(tmp_path / "set", **changes)
    with pytest.raises((ValueError, FileNotFoundError), match=said) as caught:
        own.load(root, image_size=8, progress=False)
    assert len(str(caught.value)) < SHORT


NINES, BOX = "9" * 5000, " 0.5 0.5 0.5 0.5"
LONG = {
    "a.txt, row 1": [NINES + BOX, "1" + "0" * 400 + BOX, f"{NINES}.5{BOX}", f"-{NINES}{BOX}"],
    "a.txt, row 1 holds": ["x" * 5000 + BOX],
    "data.yaml": ["[0x" + "f" * 5000 + "]", f"[{NINES}]", "{" + NINES + ": a}"],
    "instances.json cannot be read": ['{"images": [{"id": ' + NINES + "}]}"],
    "a.xml, row 1": [
        f"<annotation><object><name>{'n' * 5000}</name><bndbox><xmin>{NINES}x</xmin></bndbox>"
        "</object></annotation>"
    ],
}


@pytest.mark.parametrize("said", LONG)
def test_words_of_thousands_of_letters_or_digits_give_one_short_message(tmp_path, said):
    (tmp_path / "labels").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "labels/a.png")
    name = said.split(",")[0].split()[0]
    for content in LONG[said]:
        if name == "data.yaml":
            (tmp_path / "labels/a.txt").write_text("0" + BOX)
            content = f"names: {content}"
        place = "" if name in ("data.yaml", "instances.json") else "labels"
        (tmp_path / place / name).write_text(content)
        with pytest.raises(ValueError, match=re.escape(said)) as caught:
            own.load(tmp_path, image_size=8, progress=False)
        assert len(str(caught.value)) < SHORT


def test_culprits_are_cut_and_both_ends_are_shown():
    assert first_few(["a" * 50]) == "a" * 50
    cut = first_few(["begin" + "x" * 5000 + "end"])
    assert (len(cut), cut[:5], cut[-3:]) == (200, "begin", "end")


def test_no_reader_of_data_opens_a_file_by_itself():
    """Metadata is opened in one place; what is left reads caches and files of the package."""
    root = Path(regular_files.__file__).parent
    own_files = {"regular_files.py", "cache.py", "camera.py", "weather.py", "scanners.py"}
    found = {
        path.name
        for path in root.rglob("*.py")
        for text in [path.read_text()]
        if any(word in text for word in (" open(", ".read_text(", ".read_bytes(", "Image.open("))
    }
    assert found <= own_files


def test_long_names_of_arrays_are_one_short_sentence(tmp_path):
    name = "n" * 5000
    for arrays_there in ({name: np.zeros(1)}, {f"{name}__images": np.zeros((1, 2, 2, 3))}):
        np.savez(tmp_path / "a.npz", **arrays_there)
        for reader in (
            read_archive,
            lambda path: read_trace(str(path), 2),
        ):
            if reader is not read_archive and len(name) < len(next(iter(arrays_there))):
                continue
            with pytest.raises(ValueError, match=r"a\.npz") as caught:
                reader(tmp_path / "a.npz")
            assert len(str(caught.value)) < SHORT
