"""The digits benchmark from tiny originals and archives that the tests write themselves."""

import gzip
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fedjax_bn.data.division.by_class import fraction_size
from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.data.domain import Split, check_dataset
from fedjax_bn.data.sets import digits
from fedjax_bn.data.sets.digit_files import ORIGINALS, _read_idx, mnist, to_digits
from tiny_digits import (
    TEST,
    TRAIN,
    archive,
    idx_bytes,
    labels_of,
    shades,
    write_mnist,
    write_originals,
    write_usps_libsvm,
)

NAMES = ["mnist", "svhn", "usps", "synth_digits", "mnist_m"]
usps = ORIGINALS["usps"][1]


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    return write_originals(tmp_path_factory.mktemp("digits"))


@pytest.fixture
def own(originals, tmp_path) -> Path:
    """Originals that a test may spoil."""
    return shutil.copytree(originals, tmp_path / "own")


def grey(images: np.ndarray) -> np.ndarray:
    """The shade of plain images, of any layout with samples first."""
    return images.reshape(len(images), -1)[:, 0]


def assert_published(train, test) -> None:
    """Every label sits at its own image."""
    for split, base in ((train, 0), (test, 100)):
        count = len(split.labels)
        np.testing.assert_array_equal(split.labels, labels_of(count))
        assert split.labels.dtype == np.int32
        np.testing.assert_array_equal(grey(split.read(np.arange(count))), base + np.arange(count))


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_is_read_from_idx_files_zipped_or_not(tmp_path, zipped):
    write_mnist(tmp_path / "m", zipped)
    assert_published(*mnist(tmp_path / "m"))


def test_mnist_is_found_where_torchvision_puts_it(tmp_path):
    write_mnist(tmp_path / "raw", zipped=False)
    assert_published(*mnist(tmp_path))


@pytest.mark.parametrize("name", NAMES)  # label 10 of SVHN is the digit 0, USPS is usps.h5
def test_an_original_is_read_with_the_digits_as_labels(originals, name):
    folder, read = ORIGINALS[name]
    assert_published(*read(originals / folder))


@pytest.mark.parametrize("packed", [True, False])
def test_usps_libsvm_labels_count_from_one_and_values_from_minus_one(tmp_path, packed):
    write_usps_libsvm(tmp_path / "u", packed)
    assert_published(*usps(tmp_path / "u"))


def test_resizing_is_pillows_bilinear_and_grey_becomes_three_equal_channels():
    image = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (2, 16, 16), dtype=np.uint8)
    seen = to_digits(image)
    expected = np.asarray(Image.fromarray(image[1]).resize((28, 28), Image.BILINEAR))
    assert seen.shape == (2, 28, 28, 3)
    for channel in range(3):
        np.testing.assert_array_equal(seen[1, ..., channel], expected)


def test_five_clients_in_the_order_of_the_authors_code(originals):
    dataset = check_dataset(digits.load(originals, fraction=1.0))
    assert [domain.name for domain in dataset.domains] == NAMES
    assert all(domain.validation is None for domain in dataset.domains)


def test_training_sets_are_cut_to_a_tenth_of_the_smallest_by_default(originals):
    dataset = digits.load(originals)
    smallest = 4 * (TRAIN + TEST) // 5
    assert [len(domain.train.labels) for domain in dataset.domains] == [smallest // 10] * 5


def test_without_truncation_each_domain_gives_its_own_fraction(originals):
    dataset = digits.load(originals, fraction=0.5, truncate=False)
    totals = [TRAIN, TRAIN + 7, TRAIN, TRAIN + 7, TRAIN + 3]
    pools = [4 * (total + TEST) // 5 for total in totals]
    assert [len(domain.train.labels) for domain in dataset.domains] == [n // 2 for n in pools]


def test_the_resplit_of_usps_has_the_7438_samples_of_the_paper():
    labels = np.arange(7291 + 2007, dtype=np.int32) % 10
    one = digits.Original(labels[:7291], lambda index: index)
    two = digits.Original(labels[7291:], lambda index: index + 7291)
    train, test = digits._divide(one, two)
    assert len(train.labels) == 7438
    assert fraction_size(7438, 0.1) == 743
    both = np.concatenate([part.read(np.arange(len(part.labels))) for part in (train, test)])
    np.testing.assert_array_equal(np.sort(both), np.arange(9298))
    order = np.arange(len(train.labels))[::-7]
    np.testing.assert_array_equal(train.labels[order], labels[train.read(order)])


def test_test_samples_are_whole_and_the_same_for_every_seed(originals):
    first, second = (digits.load(originals, seed=seed, fraction=0.5) for seed in (0, 1))
    sizes = [len(domain.test.labels) for domain in first.domains]
    assert sizes == [12, 14, 12, 14, 13]
    for one, two in zip(first.domains, second.domains, strict=True):
        np.testing.assert_array_equal(one.test.images, two.test.images)
        assert not np.array_equal(one.train.images, two.train.images)
    assert fingerprint(digits.load(originals, fraction=0.5)) == fingerprint(first)


def test_no_sample_is_in_both_training_and_test(originals):
    for domain in digits.load(originals, fraction=1.0).domains:
        train, test = set(grey(domain.train.images)), set(grey(domain.test.images))
        assert not train & test
        assert len(train) == len(domain.train.labels)


def test_names_of_folders_may_have_other_case_and_joints(own):
    (own / "MNIST-M").rename(own / "mnist_m")
    (own / "SynthDigits").rename(own / "synth_digits")
    assert len(digits.load(own).domains) == 5


def test_npz_domains_keep_the_files_order_and_by_default_all_images(tmp_path):
    dataset = digits.load(archive(tmp_path / "a.npz"))
    assert [domain.name for domain in dataset.domains] == ["zeta", "alpha"]
    assert [len(domain.train.labels) for domain in dataset.domains] == [30, 20]


def test_npz_is_cut_to_the_smallest_only_when_asked(tmp_path):
    path = archive(tmp_path / "a.npz")
    half = digits.load(path, fraction=0.5)
    cut = digits.load(path, fraction=0.5, truncate=True)
    assert [len(domain.train.labels) for domain in half.domains] == [15, 10]
    assert [len(domain.train.labels) for domain in cut.domains] == [10, 10]
    assert [len(domain.test.labels) for domain in cut.domains] == [30, 20]


def test_the_shared_archive_loads_whole(shared):
    dataset = digits.load(shared / "data" / "digits.npz")
    sizes = {domain.name: len(domain.train.labels) for domain in dataset.domains}
    assert sizes == {"mnist": 742, "svhn": 554, "usps": 743, "fonts": 743, "mnist_m": 743}
    assert isinstance(dataset.domains[0].test, Split)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"zeta__train_images": np.zeros((30, 28, 28, 3))}, "it must be uint8 [N, 28, 28, 3]"),
        (
            {"zeta__train_images": np.zeros((30, 32, 32, 3), np.uint8)},
            "(30, 32, 32, 3); it must be",
        ),
        ({"alpha__test_labels": np.full(20, 10)}, "alpha__test_labels has label 10 at index 0"),
        (
            {"alpha__test_labels": None, "alpha__test_images": None},
            "parts train of 'alpha'",
        ),
    ],
)
def test_a_wrong_npz_is_refused_naming_file_and_array(tmp_path, changes, sentence):
    path = archive(tmp_path / "bad.npz", **changes)
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        digits.load(path)
    assert "bad.npz" in str(caught.value)


def test_an_npz_with_a_flipped_byte_is_refused_naming_the_file(tmp_path):
    path = archive(tmp_path / "flipped.npz")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 255
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"flipped\.npz cannot be read"):
        digits.load(path)


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("MNIST/t10k-labels-idx1-ubyte.gz", "yann.lecun.com"),
        ("SVHN/test_32x32.mat", "ufldl.stanford.edu/housenumbers"),
        ("USPS/usps.h5", "LIBSVM"),
        ("SynthDigits/synth_train_32x32.mat", "ganin.net"),
        ("MNIST-M/mnist_m_test_labels.txt", "mnist_m_train/*.png"),
        ("MNIST-M/mnist_m_test/00000003.png", "mnist_m.tar.gz"),
    ],
)
def test_a_missing_file_is_named_with_what_belongs_there_and_its_source(own, missing, remedy):
    (own / missing).unlink()
    stem = "usps.bz2" if "usps" in missing else Path(missing).name.removesuffix(".gz")
    with pytest.raises(FileNotFoundError, match=re.escape(stem)) as caught:
        digits.load(own, fraction=1.0)
    assert remedy in str(caught.value)


def test_a_missing_folder_is_named_with_all_that_are_needed(own):
    (own / "USPS").rename(own / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"USPS is missing; .* MNIST, SVHN, USPS"):
        digits.load(own)


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.path .*nowhere does not exist; give"):
        digits.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"digits needs data\.path"):
        digits.load(None)
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"neither a folder nor a \.npz"):
        digits.load(tmp_path / "a.txt")


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan")])
def test_a_fraction_out_of_range_is_refused(originals, fraction):
    with pytest.raises(ValueError, match=r"data\.fraction is .*; it must be above 0 and at most 1"):
        digits.load(originals, fraction=fraction)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "not an idx file of bytes with 3 axes"),
        (b"\0\0\x0d\x03" + bytes(12), "it begins with 00000d03, not 00000803"),
        (idx_bytes(np.zeros((2, 4, 4)))[:-1], "has 31 values where its header has (2, 4, 4)"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "it claims 79,228,162,458,924,105,728.0 GB"),
    ],
)
def test_a_bad_idx_file_is_refused_naming_the_fault(tmp_path, raw, sentence):
    (tmp_path / "images").write_bytes(raw)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        _read_idx(tmp_path / "images", axes=3)


def test_a_bad_gzip_is_refused_naming_the_file(tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx_bytes(shades(3, 28, 28)))[:-9])
    with pytest.raises(ValueError, match=r"images\.gz cannot be read"):
        _read_idx(path, axes=3)


SPOILED = {
    "MNIST/train-labels-idx1-ubyte.gz": (
        gzip.compress(idx_bytes(np.full(TRAIN, 11))),
        "has label 11 at index 0; labels must be whole numbers in 0..9",
    ),
    "MNIST/t10k-labels-idx1-ubyte.gz": (gzip.compress(idx_bytes(np.zeros(3))), "but t10k-labels"),
    "SVHN/train_32x32.mat": (b"MATLAB 5.0 no more" * 20, "train_32x32.mat cannot be read"),
    "USPS/usps.h5": (b"\x89HDF", "usps.h5 cannot be read"),
    "MNIST-M/mnist_m_train_labels.txt": (
        b"00000000.png\n",
        "lines must be FILE LABEL, but these are not: 1",
    ),
    "MNIST-M/mnist_m_train/00000002.png": (b"\x89PNG", "00000002.png cannot be read"),
}


@pytest.mark.parametrize("file", SPOILED)
def test_a_corrupt_original_is_refused_naming_the_file(own, file):
    raw, sentence = SPOILED[file]
    (own / file).write_bytes(raw)
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        digits.load(own, fraction=1.0)
    assert str(own) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"X": np.zeros((32, 32, 3, 4), np.uint8)},
            "train_32x32.mat cannot be read (KeyError: 'y')",
        ),
        ({"X": np.zeros((32, 32, 4), np.uint8), "y": np.ones(4)}, "not uint8 (32, 32, 3, 4)"),
        (
            {"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.array([1, 2, 0, 4])},
            "has label 0 at index 2; labels must be whole numbers in 1..10",
        ),
    ],
)
def test_a_mat_file_of_another_form_is_refused_naming_the_fault(own, content, sentence):
    savemat(own / "SVHN" / "train_32x32.mat", content)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        digits.load(own)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("11 1:0.5", "has label 11.0 at index 0; labels must be whole numbers in 1..10"),
        ("3 1:2.5", "in the range of the format"),
        ("3 257:0.5", "usps cannot be read"),
        ("three", "usps cannot be read"),
    ],
)
def test_a_libsvm_line_of_another_form_is_refused_naming_the_fault(tmp_path, line, sentence):
    write_usps_libsvm(tmp_path / "u", packed=False)
    (tmp_path / "u" / "usps").write_text(line + "\n")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        usps(tmp_path / "u")


def test_an_empty_training_set_is_refused_naming_the_domain(own):
    for part in ("train", "t10k"):
        for kind, array in (("images-idx3", np.zeros((0, 28, 28))), ("labels-idx1", np.zeros(0))):
            path = own / "MNIST" / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(idx_bytes(array)))
    with pytest.raises(ValueError, match="mnist has no training samples"):
        digits.load(own)
