"""Image folders: what counts as a class or an image, what is left out, what is an error."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedjax_bn.data.sets.folders import (
    Published,
    domain_folders,
    files_below,
    is_image,
    list_domain,
    match_folders,
    subfolders,
    to_source,
)
from trees import assert_in_place, write_shade, write_tree

DOMAINS, CLASSES = ("north", "Far South"), ("ant", "big_bee", "cow")
PETS = Published(
    name="pets",
    title="Pets",
    about="small and large",
    domains={"north": (), "Far South": ("south",)},
    classes={"ant": (), "big_bee": (), "cow": ("0",)},
    counts={"north": 6, "Far South": 6},
    where="it must hold north and Far South (from example.org)",
    mean=(0.5,),
    std=(0.5,),
)


def load(path: Path):
    root, folders = domain_folders(path, PETS)
    listings = [list_domain(name, folder, PETS) for name, folder in folders.items()]
    return to_source(PETS, root, listings, 6, cache=None, progress=False)


@pytest.fixture
def tree(tmp_path) -> Path:
    return write_tree(tmp_path / "pets", DOMAINS, CLASSES)


def test_images_come_by_domain_class_and_name(tree):
    source = load(tree)
    assert source.classes == CLASSES
    assert source.notes == ()
    assert [pool.name for pool in source.pools] == list(DOMAINS)
    assert source.pools[1].names.tolist() == [
        f"Far South/{name}/{k}.png" for name in CLASSES for k in range(2)
    ]
    assert source.pools[0].labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert_in_place(source)


@pytest.mark.parametrize("spelling", ["far_south", "FarSouth", "FAR-SOUTH", "South"])
def test_folders_may_be_spelled_in_other_ways(tree, spelling):
    (tree / "Far South").rename(tree / spelling)
    (tree / "north" / "big_bee").rename(tree / "north" / "Big Bee")
    (tree / "north" / "cow").rename(tree / "north" / "0")
    source = load(tree)
    assert [pool.name for pool in source.pools] == list(DOMAINS)
    assert_in_place(source)


def test_the_domains_may_lie_one_folder_deeper(tree):
    assert domain_folders(tree.parent, PETS)[0] == tree


def test_the_classes_may_lie_in_a_folder_called_images(tree):
    (tree / "north").rename(tree / "images")
    (tree / "north").mkdir()
    (tree / "images").rename(tree / "north" / "images")
    assert_in_place(load(tree))


def test_the_key_tells_contents_apart_and_not_machines(tree, tmp_path):
    key = load(tree).key
    assert key == load(write_tree(tmp_path / "copy" / "pets", DOMAINS, CLASSES)).key
    write_shade(tree / "north" / "ant" / "0.png", 7, size=40)
    assert load(tree).key != key


def test_stray_files_are_left_out_and_counted(tree):
    for name in ("Thumbs.db", ".DS_Store", "._0.png", "notes.txt"):
        (tree / "north" / "ant" / name).write_bytes(b"x")
    (tree / "north" / "desktop.ini").write_bytes(b"x")
    write_shade(tree / "Far South" / "dingo" / "0.png", 1)
    write_shade(tree / "north" / "cow" / "calves" / "0.png", 1)
    source = load(tree)
    (note,) = source.notes
    assert note.startswith("left out 7 files or folders that are not images of a class: ")
    assert note.endswith(" and 4 more")
    assert [len(pool.labels) for pool in source.pools] == [6, 6]


@pytest.mark.parametrize("target", ["nowhere", "gone.png"], ids=["nothing", "itself"])
def test_a_link_that_leads_nowhere_is_counted_if_an_image_and_refused_if_a_class(tree, target):
    (tree / "north" / "ant" / "gone.png").symlink_to(target)
    source = load(tree)
    (note,) = source.notes
    assert "north/ant/gone.png" in note
    assert [len(pool.labels) for pool in source.pools] == [6, 6]
    shutil.rmtree(tree / "Far South" / "cow")
    (tree / "Far South" / "cow").symlink_to("cow" if target == "gone.png" else target)
    with pytest.raises(OSError, match=re.escape(str(tree / "Far South" / "cow"))):
        load(tree)


def test_a_link_in_a_circle_is_refused(tree):
    (tree / "north" / "circle").symlink_to("circle")
    with pytest.raises(OSError, match=re.escape(str(tree / "north" / "circle"))):
        load(tree)


def test_no_file_below_a_folder_is_left_out_without_a_word(tree):
    (tree / "north" / "ant" / "gone.png").symlink_to("nowhere")
    names = {file.name for file in files_below(tree)}
    assert names == {"0.png", "1.png", "gone.png"}  # whose reader finds that it is missing
    (tree / "north" / "train").symlink_to("nowhere")
    with pytest.raises(OSError, match="north/train"):
        files_below(tree)


@pytest.mark.parametrize("name", ["__MACOSX", "@eaDir"])
def test_folders_of_systems_are_no_data(tree, name):
    count = len(files_below(tree))
    for place in (tree, tree / "north", tree / "north" / "ant"):
        write_shade(place / name / "0.png", 1)
    assert load(tree).notes == ()
    assert len(files_below(tree)) == count
    assert name not in {folder.name for folder in subfolders(tree)}


@pytest.mark.parametrize(
    ("name", "image"),
    [("a.JPG", True), ("a.b.jpeg", True), ("a.webp", True), (".a.jpg", False), ("jpg", False)],
)
def test_images_are_told_by_their_suffix(name, image):
    assert is_image(name) == image


@pytest.mark.parametrize(("extra", "why"), [(1, "added"), (-1, "missing")])
def test_another_count_than_published_is_a_note(tree, extra, why):
    if extra > 0:
        write_shade(tree / "north" / "ant" / "2.png", 0)
    else:
        (tree / "north" / "ant" / "0.png").unlink()
    (note,) = load(tree).notes
    assert note.startswith(f"pets, north: found {6 + extra} images, expected 6 (")
    assert why in note


def test_empty_class_folders_are_named_together(tree):
    for folder in (tree / "north" / "ant", tree / "north" / "cow"):
        for file in folder.iterdir():
            file.unlink()
    with pytest.raises(ValueError, match="ant, cow"):
        load(tree)


def test_a_class_without_folder_is_named(tree):
    (tree / "Far South" / "big_bee").rename(tree / "Far South" / "wasp")
    with pytest.raises(ValueError, match="big_bee") as error:
        load(tree)
    assert "example.org" in str(error.value)


def test_missing_domains_are_named_with_what_to_do(tree):
    (tree / "north").rename(tree / "northwest")
    with pytest.raises(FileNotFoundError, match="north of pets"):
        load(tree)


@pytest.mark.parametrize("path", ["nowhere", "pets/north", "pets/north/ant/0.png", ""])
def test_a_wrong_path_is_named_with_what_to_do(tree, path):
    with pytest.raises(FileNotFoundError, match=r"data.path .*example\.org"):
        load(path and tree.parent / path)


def test_folders_that_differ_in_spelling_only_are_refused(tmp_path):
    folders = [tmp_path / "Far_South", tmp_path / "far south"]
    with pytest.raises(ValueError, match="Far South"):
        match_folders(folders, PETS.domains)
    exact = [*folders, tmp_path / "Far South"]
    assert match_folders(exact, PETS.domains) == {"Far South": exact[2]}


def test_parts_come_from_the_folders_of_that_name(tmp_path):
    for part, count in (("train", 3), ("val", 1)):
        write_tree(tmp_path / "north", [part], CLASSES, count)
    pets = PETS._replace(parts={"train": 0, "val": 1}, always_divided=True)
    listing = list_domain("north", tmp_path / "north", pets)
    np.testing.assert_array_equal(listing.parts, [0] * 9 + [1] * 3)
    assert listing.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 1, 2]
