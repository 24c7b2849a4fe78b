"""A user's own images and arrays, through `run.experiment.build` as a run reads them."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.sets import folders, npz
from fedjax_bn.run.experiment.build import build
from trees import shade_of, write_shade, write_tree

DOMAINS, CLASSES = ("day", "dusk", "night"), ("ant", "bee")
RNG = np.random.default_rng(0)


def config_of(name: str, path: Path, **keys):
    """A small run on data of one's own; `__` for a dot."""
    own = {"data__name": name, "data__path": str(path), "data__cache": "", "target": ""}
    return runs.config(**own | {"batch_size": 3, "data__image_size": 6} | keys)


def random_bytes(n: int) -> np.ndarray:
    return RNG.integers(0, 256, (n, 6, 6, 3), dtype=np.uint8)


def arrays(make=random_bytes, **changes) -> dict:
    """Twelve samples a domain, two classes; `changes` replace arrays, None removes one."""
    content = {}
    for name in DOMAINS:
        content[f"{name}__images"] = make(12)
        content[f"{name}__labels"] = np.arange(12) % 2
    return {key: value for key, value in (content | changes).items() if value is not None}


def write_npz(path: Path, **changes) -> Path:
    np.savez(path, **arrays(**changes))
    return path


@pytest.fixture
def tree(tmp_path) -> Path:
    return write_tree(tmp_path / "mine", DOMAINS, CLASSES, 10)


def test_a_tree_of_ones_own_trains_validates_and_serves_an_unseen_domain(tree):
    keys = {"target": "night", "adaptations": ("running", "tsmobn"), "batch_size": 4}
    built = build(config_of("folders", tree, data__validation=0.2, **keys))
    assert [domain.name for domain in built.internal.domains] == ["day", "dusk"]
    assert built.internal.classes == CLASSES
    assert [len(d.train.labels) for d in built.internal.domains] == [16, 16]
    assert [len(d.validation.labels) for d in built.internal.domains] == [4, 4]
    (unseen,) = built.unseen
    assert (unseen.name, len(unseen.test.labels)) == ("night", 20)
    assert list(built.adaptations) == ["running", "tsmobn"]
    for d, domain in enumerate((*built.internal.domains, unseen)):
        shades = [shade_of(d, label) for label in domain.test.labels.tolist()]
        assert np.asarray(domain.test.images)[:, 0, 0, 0].tolist() == shades


def test_domains_and_classes_can_be_chosen_and_ordered(tree):
    keys = {"data__domains": ("night", "Day"), "data__classes": ("bee", "ant")}
    built = build(config_of("folders", tree, **keys))
    assert [domain.name for domain in built.internal.domains] == ["night", "Day"]
    assert built.internal.classes == ("bee", "ant")
    first = built.internal.domains[0].train
    expected = [shade_of(2, 1 - label) for label in first.labels.tolist()]
    assert np.asarray(first.images)[:, 0, 0, 0].tolist() == expected


def test_classes_that_differ_in_spelling_or_the_form_of_unicode_only_are_one(tree):
    composed, decomposed = (unicodedata.normalize(form, "café au") for form in ("NFC", "NFD"))
    for domain, name in (("day", composed), ("dusk", decomposed), ("night", "Café_au")):
        (tree / domain / "bee").rename(tree / domain / name)
    (tree / "lists").mkdir()  # a folder without folders is no domain
    source = folders.load_folders(tree, image_size=6, progress=False)
    assert [pool.name for pool in source.pools] == list(DOMAINS)
    assert source.classes == ("Café_au", "ant")
    assert [np.bincount(pool.labels).tolist() for pool in source.pools] == [[10, 10]] * 3
    write_shade(tree / "day" / decomposed / "0.png", 1)
    with pytest.raises(ValueError, match="may both be"):
        folders.load_folders(tree, image_size=6, progress=False)


def test_no_split_separates_what_the_pattern_of_groups_matches(tree):
    keys = {"data__groups": r"(\d)\.png", "data__test": 0.2, "data__validation": 0.2}
    built = build(config_of("folders", tree, **keys))
    for domain in built.internal.domains:
        names = [set(split.names.tolist()) for split in domain[1:]]
        assert [len(part) for part in names] == [6, 2, 2]  # of ten numbers, in both classes
        assert len(set.union(*names)) == 10
        assert [len(split.labels) for split in domain[1:]] == [12, 4, 4]
    assert "day: 10 groups of 20 images by data.groups" in built.notes
    # The images of a class are plain and equal.
    assert any("4 of the 4 of day (most in day)" in note for note in built.notes)
    with pytest.raises(ValueError, match=r"data\.groups"):
        build(config_of("folders", tree, data__groups="patient"))


def test_a_domain_that_lacks_a_class_is_named_with_what_to_do(tree):
    write_shade(tree / "dusk" / "cow" / "0.png", 1)
    with pytest.raises(ValueError, match="cow") as error:
        build(config_of("folders", tree))
    assert "data.classes" in str(error.value)
    built = build(config_of("folders", tree, data__classes=CLASSES))
    assert built.internal.num_classes == 2


@pytest.mark.parametrize(
    ("path", "keys", "culprit"),
    [
        ("nowhere", {}, "nowhere"),
        ("mine/day", {}, "day"),
        ("mine", {"domains": ("day", "dawn")}, "dawn"),
        ("mine", {"domains": ("day", "Day")}, "day, Day"),
    ],
)
def test_a_wrong_tree_or_choice_is_named(tree, path, keys, culprit):
    with pytest.raises((FileNotFoundError, ValueError), match=culprit):
        folders.load_folders(tree.parent / path, image_size=6, progress=False, **keys)


@pytest.mark.parametrize(
    "images",
    [
        random_bytes,
        lambda n: RNG.standard_normal((n, 6, 6, 3), dtype=np.float32),
        lambda n: RNG.standard_normal((n, 5), dtype=np.float32),
    ],
    ids=["bytes", "float images", "features"],
)
def test_an_archive_of_ones_own_is_divided_and_served_as_any_source(tmp_path, images):
    content = arrays(images)
    np.savez(tmp_path / "own.npz", **content)
    keys = {"target": "dusk", "adaptations": ("running", "tsmobn"), "data__validation": 0.25}
    built = build(config_of("npz", tmp_path / "own.npz", **keys))
    assert [domain.name for domain in built.internal.domains] == ["day", "night"]
    assert [len(domain.train.labels) for domain in built.internal.domains] == [9, 9]
    (unseen,) = built.unseen
    assert built.internal.classes == ("0", "1")
    order = [int(name.split("/")[1]) for name in unseen.test.names]
    np.testing.assert_array_equal(unseen.test.images, content["dusk__images"][order])
    np.testing.assert_array_equal(unseen.test.labels, content["dusk__labels"][order])
    assert unseen.test.labels.dtype == np.int32


def test_an_archive_may_come_divided_and_name_its_classes(tmp_path):
    content = {"classes": np.array(["ant", "bee", "cow"])}
    for name in DOMAINS:
        for part, count in (("test", 3), ("train", 6)):
            content[f"{name}__{part}_images"] = np.full((count, 6, 6, 3), count, np.uint8)
            content[f"{name}__{part}_labels"] = np.arange(count, dtype=np.uint8) % 2
    np.savez(tmp_path / "own.npz", **content)
    built = build(config_of("npz", tmp_path / "own.npz", data__domains=("night", "day")))
    assert built.internal.classes == ("ant", "bee", "cow")
    assert [domain.name for domain in built.internal.domains] == ["night", "day"]
    for domain in built.internal.domains:
        assert (np.asarray(domain.test.images) == 3).all()
        assert len(domain.test.labels) == 3
        assert len(domain.train.labels) + len(domain.validation.labels) == 6


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"day__labels": np.arange(12) % 2 + 0.5}, "day__labels"),
        ({"day__labels": np.arange(12) % 2 + 3}, "labels 0, 1, 3, 4"),
        ({"day__labels": np.zeros(11, int)}, "day__images"),
        ({"day__labels": None}, "day__labels"),
        ({"day__images": np.zeros((12, 6, 6), np.uint8)}, "day__images"),
        ({"day__test_images": np.zeros((1, 6, 6, 3), np.uint8)}, "day"),
        ({"images": np.zeros(3)}, "has images"),
        ({"day__dev_images": np.zeros(3)}, "day__dev"),
        ({"classes": np.array(["ant"])}, "label 1"),
        ({"classes": np.array(["ant", "ant"])}, "classes"),
    ],
)
def test_a_wrong_archive_is_refused_naming_file_and_array(tmp_path, changes, culprit):
    path = write_npz(tmp_path / "own.npz", **changes)
    with pytest.raises(ValueError, match=culprit) as error:
        npz.load_npz(path)
    assert str(path) in str(error.value)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        npz.load_npz(tmp_path / "nowhere")


class _Call:
    """Asks whoever unpickles it to write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_an_array_of_objects_is_not_unpickled(tmp_path):
    labels = np.array([_Call(tmp_path / "called"), *range(11)], object)
    with pytest.raises(ValueError, match=r"own\.npz"):
        npz.load_npz(write_npz(tmp_path / "own.npz", day__labels=labels))
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("name", ["folders", "npz"])
def test_without_a_path_the_sentence_says_what_it_must_be(name):
    with pytest.raises(ConfigError, match=r"--config\.data\.path=PATH.*DOMAIN"):
        build(config_of(name, ""))
