"""A finished run is tested on what a new place has: any names, some classes, another size."""

import sys

import numpy as np
import pytest

import runs
from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS
from fedjax_bn.run import evaluate as new_data
from fedjax_bn.run.files import finished_run
from fedjax_bn.run.files.finished_run import recorded_code
from trees import shade_of, write_shade, write_tree

PACS = tuple(IMAGE_FOLDERS["pacs"].classes)
FORM = {"num_classes": 7, "classes": PACS}


def read(path, form=FORM, name="pacs", **changes):
    keys = {"data__name": "pacs", "data__image_size": 6, "data__cache": "", "target": ""}
    own = runs.config(**keys, data__path="trained/on")
    keys |= {"data__name": name, "data__path": str(path)}
    return new_data.read_new(runs.config(**keys | changes), own, form)


def labels_by_shade(pool):
    """The label of each shade of a pool's images."""
    return {int(image[0, 0, 0]): int(n) for image, n in zip(pool.images, pool.labels, strict=True)}


@pytest.mark.parametrize("name", ["pacs", "folders"])
def test_a_folder_of_any_domains_is_read_with_the_runs_classes_in_the_runs_order(tmp_path, name):
    # "person" is missing here, and names of folders sort in another order than the run's.
    there = ("house", "Dog", "guitar", "elephant", "horse", "giraffe")
    write_tree(tmp_path, ["hospital9", "ward b"], there, count=1)
    write_shade(tmp_path / "hospital9" / "unicorn" / "0.png", 250)
    source = read(tmp_path, name=name)
    assert [pool.name for pool in source.pools] == ["hospital9", "ward b"]
    assert source.classes == PACS
    for d, pool in enumerate(source.pools):
        expected = {shade_of(d, c): PACS.index(one.lower()) for c, one in enumerate(there)}
        assert labels_by_shade(pool) == expected
    assert any("unicorn" in note for note in source.notes)
    (chosen,) = read(tmp_path, name=name, data__domains=("ward b",)).pools
    assert chosen.name == "ward b"


def test_classes_without_names_are_folders_of_their_labels(tmp_path):
    # Of a run on the embedded digits; in order of the names "10" would come before "2".
    keys = {"data__image_size": 6, "data__cache": ""}
    own, form = runs.config(**keys, data__name="scanners", target="fax"), {"num_classes": 11}
    write_tree(tmp_path, ["hospital9"], ["2", "10"], count=1)
    config = runs.config(**keys, data__name="folders", data__path=str(tmp_path))
    (pool,) = new_data.read_new(config, own, form).pools
    assert sorted(pool.labels.tolist()) == [2, 10]
    write_tree(tmp_path / "words", ["hospital9"], ["two", "ten"], count=1)
    config.data.path = str(tmp_path / "words")
    with pytest.raises(ValueError, match=r"CLASS.*10"):
        new_data.read_new(config, own, form)


@pytest.mark.parametrize(
    ("arrays", "labels"), [({"classes": np.array(["horse", "dog"])}, [4, 0, 4]), ({}, [1, 0, 1])]
)
def test_an_archive_of_test_samples_alone_need_not_have_all_classes(tmp_path, arrays, labels):
    images = np.zeros((3, 6, 6, 3), np.uint8)
    given = {"h__test_images": images, "h__test_labels": [0, 1, 0] if arrays else [1, 0, 1]}
    np.savez(tmp_path / "h.npz", **given, **arrays)
    source = read(tmp_path / "h.npz", name="npz")
    assert source.classes == PACS
    assert source.pools[0].labels.tolist() == labels


def test_a_run_remembers_where_its_users_own_data_are_and_at_his_word_his_code(
    tmp_path, monkeypatch
):
    (tmp_path / "data").mkdir()
    flat = {"data.path": "data", "model": "own_net:Net"}
    about = {"config": flat, "started_in": str(tmp_path)}
    monkeypatch.setattr("sys.path", ["elsewhere"])
    assert finished_run.remembered(about).data.path == str(tmp_path / "data")
    assert sys.path == ["elsewhere"]
    with recorded_code(tmp_path, about, trust=True):
        assert sys.path == ["elsewhere", str(tmp_path)]
    gone = about | {"started_in": str(tmp_path / "gone")}
    assert finished_run.remembered(gone).data.path == "data"


def test_classes_that_the_run_does_not_have_are_refused(tmp_path):
    for arrays, name in (
        ({"h__labels": np.array([7, 0])}, "label 7"),
        ({"h__labels": np.array([1, 0]), "classes": ["dog", "cow"]}, "cow"),
    ):
        np.savez(tmp_path / "h.npz", h__images=np.zeros((2, 6, 6, 3), np.uint8), **arrays)
        with pytest.raises(ValueError, match=name):
            read(tmp_path / "h.npz")
    write_tree(tmp_path / "none", ["hospital9"], ["ant", "bee"], count=1)
    with pytest.raises(ValueError, match="DOMAIN/CLASS"):
        read(tmp_path / "none")
    write_tree(tmp_path / "other", ["hospital8"], ["dog"], count=1)
    with pytest.raises(ValueError, match=r"'hospital7'.*hospital8"):
        read(tmp_path / "other", data__domains=("hospital7",))
