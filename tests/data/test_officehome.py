"""OfficeHome from small trees that the tests write."""

import pytest

from fedjax_bn.data.sets import image_folders
from trees import assert_in_place, write_tree

OFFICE_HOME = image_folders.IMAGE_FOLDERS["officehome"]
CLASSES = tuple(OFFICE_HOME.classes)


def load(path):
    return image_folders.load(OFFICE_HOME, path, image_size=6, progress=False)


def test_sixty_five_classes_are_numbered_as_domainbed_sorts_them():
    assert len(CLASSES) == 65
    assert list(CLASSES) == sorted(CLASSES)


@pytest.mark.parametrize("real", ["Real World", "Real_World", "RealWorld", "real"])
def test_four_domains_are_read_however_the_last_is_spelled(tmp_path, real):
    source = load(write_tree(tmp_path, ["Art", "Clipart", "Product", real], CLASSES, 1))
    assert [pool.name for pool in source.pools] == list(OFFICE_HOME.domains)
    assert source.classes == CLASSES
    assert_in_place(source)
    expected = [note.split("expected ")[1].split()[0] for note in source.notes]
    assert expected == ["2427", "4365", "4439", "4357"]


def test_a_missing_domain_says_where_to_fetch_it(tmp_path):
    write_tree(tmp_path, ["Art", "Clipart", "Product"], CLASSES[:1], 1)
    with pytest.raises(FileNotFoundError, match=r"lacks the folders Real World of officehome: it "):
        load(tmp_path)
