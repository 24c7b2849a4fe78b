"""Published sets: Camelyon17, CIFAR-10-C and the digits, from small files of their forms."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedjax_bn.data.division.clients import make_clients
from fedjax_bn.data.sets.camelyon17 import load_camelyon17
from fedjax_bn.data.sets.cifar10_c import CORRUPTIONS, EXTRA, TYPES, load_cifar10_c
from fedjax_bn.data.sets.digits import load_digits
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION
from fedjax_bn.run.config import defaults
from fedjax_bn.run.experiment.datasets import DATASETS, configured_clients
from tiny_digits import archive, labels_of, shades

# patient, node, center, slide
SLIDES = (
    (4, 4, 0, 0),
    (9, 1, 0, 1),
    (20, 0, 1, 10),
    (40, 2, 2, 20),
    (60, 3, 3, 30),
    (80, 4, 4, 40),
)
PATCHES = 4  # of each slide
COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")


def write(folder: Path, **change) -> Path:
    """Writes the patches, and their table with changes of its first row."""
    folder.mkdir(exist_ok=True)
    rows = []
    for patient, node, center, slide in SLIDES:
        for k in range(PATCHES):
            values = (f"{patient:03}", node, 96 * k, 21792, k % 2, slide, center, int(k == 3))
            rows.append(dict(zip(COLUMNS, values, strict=True)))
            name = f"patient_{patient:03}_node_{node}"
            patch = folder / "patches" / name / f"patch_{name}_x_{96 * k}_y_21792.png"
            patch.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGBA", (96, 96), (len(rows) - 1, 0, 0, 255)).save(patch)
    rows[0] |= change
    with (folder / "metadata.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["", *COLUMNS])
        table.writeheader()
        table.writerows({"": number} | row for number, row in enumerate(rows))
    return folder


def load(path, **options):
    return load_camelyon17(path, progress=False, **options)


def test_hospitals_are_domains_with_wilds_parts_and_every_patch_keeps_its_row(tmp_path):
    source = load(write(tmp_path / "camelyon17_v1.0").parent)
    assert [pool.name for pool in source.pools] == [f"center{k}" for k in range(5)]
    assert [len(pool.labels) for pool in source.pools] == [8, 4, 4, 4, 4]
    order = np.concatenate([pool.images[:, 50, 50, 0] for pool in source.pools])
    assert order.tolist() == list(range(24))
    assert source.pools[0].labels.tolist() == [0, 1] * 4
    assert source.pools[0].names[1].endswith("node_4/patch_patient_004_node_4_x_96_y_21792.png")
    assert source.groups == {"unseen": ("center1", "center2")}
    assert "found 8 images, expected 59436" in source.notes[0]
    divided = [TRAIN, TRAIN, TRAIN, VALIDATION]
    parts = [pool.parts.tolist() for pool in source.pools]
    assert parts == [divided * 2, [VALIDATION] * 4, [TEST] * 4, divided, divided]


@pytest.mark.parametrize("change", [{"split": 3}, {"center": None}])
def test_a_wrong_or_missing_table_is_named(tmp_path, change):
    folder = write(tmp_path / "copy", **change)
    with pytest.raises(ValueError, match=str(folder / "metadata.csv")):
        load(folder)
    with pytest.raises(FileNotFoundError, match=r"metadata\.csv"):
        load(tmp_path / "nowhere")


COUNT = 20
SOME = ("fog", "contrast")


def write_published(folder: Path, count: int = COUNT) -> Path:
    """Plain images: red shows the photograph, green the severity, blue the corruption."""
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(CORRUPTIONS):
        images = np.zeros((5, count, 32, 32, 3), np.uint8)
        images[..., 0] = np.arange(count)[:, None, None]
        images[..., 1] = np.arange(1, 6)[:, None, None, None]
        images[..., 2] = number
        np.save(folder / f"{name}.npy", images.reshape(-1, 32, 32, 3))
    np.save(folder / "labels.npy", np.tile(np.arange(count) % 10, 5).astype(np.uint8))
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    return write_published(tmp_path_factory.mktemp("c") / "CIFAR-10-C")


def load_corrupted(path, **options):
    return load_cifar10_c(path, **options)


def test_published_images_keep_corruption_severity_label_and_photograph(published):
    source = load_corrupted(published.parent, severities=(4, 2))
    assert [pool.name for pool in source.pools] == list(CORRUPTIONS)
    assert source.groups == {**TYPES, "extra": EXTRA}
    for pool in source.pools:
        assert pool.images.shape == (2 * COUNT, 32, 32, 3)
        red, green, blue = pool.images[:, 0, 0].T
        np.testing.assert_array_equal(green, np.repeat([2, 4], COUNT))
        np.testing.assert_array_equal(red, np.tile(np.arange(COUNT), 2))
        np.testing.assert_array_equal(blue, list(CORRUPTIONS).index(pool.name))
        np.testing.assert_array_equal(pool.labels, red % 10)
        # A photograph has one name in all domains and severities.
        assert pool.names[7] == pool.names[COUNT + 7] == "test/00007"
        assert len(set(pool.names)) == COUNT


@pytest.mark.parametrize("severities", [("3", "4", "5"), (1, 2, 3, 4, 5)])
def test_published_severities_in_a_row_stay_memory_mapped(published, severities):
    for pool in load_corrupted(published, domains=SOME, severities=severities).pools:
        assert isinstance(pool.images, np.memmap)


def test_images_are_resized_by_pillow_and_kept_in_the_cache(published, tmp_path):
    source = load_corrupted(published, domains=SOME, severities=(2,), image_size=48, cache=tmp_path)
    files = sorted(tmp_path.glob("*.npy"))
    assert len(files) == 2
    times = [file.stat().st_mtime_ns for file in files]
    again = load_corrupted(published, domains=SOME, severities=(2,), image_size=48, cache=tmp_path)
    assert [file.stat().st_mtime_ns for file in sorted(tmp_path.glob("*.npy"))] == times
    original = np.load(published / "fog.npy")[COUNT + 3]
    expected = np.asarray(Image.fromarray(original).resize((48, 48), Image.BILINEAR))
    np.testing.assert_array_equal(source.pools[0].images[3], expected)
    np.testing.assert_array_equal(again.pools[0].images[3], expected)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("snow", b"no array"),
        ("frost", np.zeros((5 * COUNT, 32, 32, 3))),
        ("labels", np.full(5 * COUNT, 10)),
        ("labels", np.arange(5 * COUNT) % 7),
        ("labels", np.array([{}] * 5 * COUNT)),  # objects are pickles, which are not loaded
    ],
)
def test_a_damaged_file_is_named_whole(tmp_path, name, content):
    file = write_published(tmp_path / "c") / f"{name}.npy"
    file.write_bytes(content) if isinstance(content, bytes) else np.save(file, content)
    with pytest.raises(ValueError, match=str(file)):
        load_corrupted(file.parent)


@pytest.mark.parametrize("options", [{"domains": ("fog", "fogg")}, {"severities": (0,)}])
def test_an_unknown_choice_is_refused(published, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        load_corrupted(published, **options)


MORPHO = ("morpho_global", "morpho_local")


def with_morpho(path):
    arrays = {}
    for name in MORPHO:
        arrays[f"{name}__test_images"] = shades(6, 28, 28, 3, base=200)
        arrays[f"{name}__test_labels"] = labels_of(6)
    return archive(path, **arrays)


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({}, [30, 20]),
        ({"fraction": 0.5}, [15, 10]),
        ({"fraction": 0.5, "truncate": True}, [10, 10]),
        ({"fraction": 0.5, "truncate": True, "target": ("alpha",)}, [15, 20]),
    ],
)
def test_training_sets_are_cut_and_test_sets_and_targets_whole(tmp_path, keys, sizes):
    dataset = load_digits(archive(tmp_path / "a.npz"), **keys)
    assert [domain.name for domain in dataset.domains] == ["zeta", "alpha"]
    assert all(domain.validation is None for domain in dataset.domains)
    assert [len(domain.train.labels) for domain in dataset.domains] == sizes
    assert [len(domain.test.labels) for domain in dataset.domains] == [30, 20]


def test_the_shared_archive_loads_whole(shared):
    dataset = load_digits(shared / "data" / "digits.npz")
    sizes = {domain.name: len(domain.train.labels) for domain in dataset.domains}
    assert sizes == {"mnist": 742, "svhn": 554, "usps": 743, "fonts": 743, "mnist_m": 743}


def test_morpho_mnist_only_tests_as_an_unseen_domain(tmp_path):
    path = with_morpho(tmp_path / "a.npz")
    data = load_digits(path, target=MORPHO, fraction=0.5)
    internal, unseen = make_clients(data, target=MORPHO)
    assert [len(domain.train.labels) for domain in internal.domains] == [15, 10]
    for domain in unseen:
        assert domain.test.images[:, 0, 0, 0].tolist() == list(range(200, 206))
    config = defaults.base()
    config.data.name, config.data.path = "digits_morpho", str(path)
    config.target = ",".join(MORPHO)
    _, unseen = configured_clients(DATASETS["digits_morpho"](config), config)
    assert [domain.name for domain in unseen] == list(MORPHO)
    with pytest.raises(ValueError, match="morpho_local"):
        load_digits(path, target=("morpho_global",))


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"zeta__train_images": np.zeros((30, 32, 32, 3), np.uint8)}, "zeta"),
        ({"alpha__test_labels": np.full(20, 10)}, "alpha"),
        ({"alpha__test_labels": None, "alpha__test_images": None}, "alpha"),
    ],
)
def test_another_form_is_refused_naming_file_and_domain(tmp_path, changes, culprit):
    path = archive(tmp_path / "bad.npz", **changes)
    with pytest.raises(ValueError, match=culprit):
        load_digits(path)
