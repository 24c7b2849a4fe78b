"""Image folders: what counts as a class or an image, what is left out, what is an error."""

import re
from pathlib import Path

import pytest

from fedjax_bn.data.sets.folders import (
    Published,
    domain_folders,
    files_below,
    folder_source,
    list_domain,
    match_folders,
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
    return folder_source(PETS, root, listings, 6, cache=None, progress=False)


@pytest.fixture
def tree(tmp_path) -> Path:
    return write_tree(tmp_path / "pets", DOMAINS, CLASSES)


def test_images_come_by_domain_class_and_name(tree, tmp_path):
    source = load(tree)
    assert source.classes == CLASSES
    assert source.notes == ()
    assert [pool.name for pool in source.pools] == list(DOMAINS)
    assert source.pools[1].names.tolist() == [
        f"Far South/{name}/{k}.png" for name in CLASSES for k in range(2)
    ]
    assert source.pools[0].labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert_in_place(source)
    assert source.key == load(write_tree(tmp_path / "copy" / "pets", DOMAINS, CLASSES)).key
    write_shade(tree / "north" / "ant" / "0.png", 7, size=40)
    assert load(tree).key != source.key


@pytest.mark.parametrize("spelling", ["far_south", "FAR-SOUTH", "South"])
def test_folders_may_be_spelled_in_other_ways(tree, spelling):
    (tree / "Far South").rename(tree / spelling)
    (tree / "north" / "big_bee").rename(tree / "north" / "Big Bee")
    (tree / "north" / "cow").rename(tree / "north" / "0")
    source = load(tree)
    assert [pool.name for pool in source.pools] == list(DOMAINS)
    assert_in_place(source)


def test_domains_and_classes_may_lie_one_folder_deeper(tree):
    assert domain_folders(tree.parent, PETS)[0] == tree
    (tree / "north").rename(tree / "images")
    (tree / "north").mkdir()
    (tree / "images").rename(tree / "north" / "images")
    assert_in_place(load(tree))


def test_what_is_no_image_of_a_class_is_left_out(tree):
    count = len(files_below(tree))
    for place in (tree, tree / "north", tree / "north" / "ant"):
        for name in ("__MACOSX", "@eaDir"):
            write_shade(place / name / "0.png", 1)
    assert load(tree).notes == ()
    assert len(files_below(tree)) == count
    for name in ("Thumbs.db", ".DS_Store", "._0.png", "notes.txt"):
        (tree / "north" / "ant" / name).write_bytes(b"x")
    write_shade(tree / "Far South" / "dingo" / "0.png", 1)
    write_shade(tree / "north" / "cow" / "calves" / "0.png", 1)
    assert [len(pool.labels) for pool in load(tree).pools] == [6, 6]


def test_a_link_that_leads_nowhere_is_refused(tree):
    place = tree / "north" / "ant" / "gone.png"
    place.symlink_to("nowhere")
    for read in (load, files_below):
        with pytest.raises(OSError, match=re.escape(str(place))):
            read(tree)


def test_another_count_than_published_is_a_note(tree):
    write_shade(tree / "north" / "ant" / "2.png", 0)
    (tree / "Far South" / "ant" / "0.png").unlink()
    for note, name, count in zip(load(tree).notes, DOMAINS, (7, 5), strict=True):
        assert note.startswith(f"pets, {name}: found {count} images, expected 6")


def test_classes_without_images_are_named_together_with_what_to_do(tree):
    (tree / "north" / "big_bee").rename(tree / "north" / "wasp")
    for file in (tree / "north" / "ant").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"ant, big_bee.*example\.org"):
        load(tree)


@pytest.mark.parametrize("path", ["nowhere", "pets/Far South", ""])
def test_a_wrong_path_and_missing_domains_are_named_with_what_to_do(tree, path):
    (tree / "north").rename(tree / "northwest")
    for place in (path and tree.parent / path, tree):
        with pytest.raises(FileNotFoundError, match=r"data.path .*pets.*example\.org"):
            load(place)


def test_folders_that_differ_in_spelling_only_are_refused(tmp_path):
    folders = [tmp_path / "Far_South", tmp_path / "far south"]
    with pytest.raises(ValueError, match="Far South"):
        match_folders(folders, PETS.domains)
    exact = [*folders, tmp_path / "Far South"]
    assert match_folders(exact, PETS.domains) == {"Far South": exact[2]}
