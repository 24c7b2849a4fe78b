"""Office-Caltech10 from small trees that the tests write."""

import pytest

from fedjax_bn.data.sets import image_folders
from trees import assert_in_place, write_shade, write_tree

CLASSES = tuple(image_folders.IMAGE_FOLDERS["office_caltech10"].classes)
DOMAINS = ("amazon", "caltech", "dslr", "webcam")


def load(path):
    return image_folders.load("office_caltech10", path, image_size=6, progress=False)


def test_domains_and_classes_are_in_fedbns_order_without_normalization(tmp_path):
    source = load(write_tree(tmp_path, DOMAINS, CLASSES))
    assert [pool.name for pool in source.pools] == list(DOMAINS)
    assert source.classes == (
        *("back_pack", "bike", "calculator", "headphones", "keyboard"),
        *("laptop_computer", "monitor", "mouse", "mug", "projector"),
    )
    assert source.mean == (0.0, 0.0, 0.0)
    assert source.std == (1.0, 1.0, 1.0)
    assert_in_place(source)
    expected = [note.split("expected ")[1].split()[0] for note in source.notes]
    assert expected == ["958", "1123", "157", "295"]


def test_the_form_of_office_31_serves_without_its_other_classes(tmp_path):
    write_tree(tmp_path, [f"{domain}/images" for domain in DOMAINS], CLASSES)
    for domain in DOMAINS[:3]:
        write_shade(tmp_path / domain / "images" / "stapler" / "0.png", 1)
        (tmp_path / domain / "interest_points").mkdir()
    source = load(tmp_path)
    assert_in_place(source)
    assert all(name.split("/")[1] == "images" for name in source.pools[0].names)
    assert any(note.startswith("left out 3 files or folders") for note in source.notes)


@pytest.mark.parametrize(
    ("name", "usual"), [("touring-bike", "bike"), ("laptop-101", "laptop_computer")]
)
def test_classes_may_have_the_names_of_caltech_256(tmp_path, name, usual):
    write_tree(tmp_path, DOMAINS, CLASSES)
    (tmp_path / "caltech" / usual).rename(tmp_path / "caltech" / name)
    (tmp_path / "dslr" / "back_pack").rename(tmp_path / "dslr" / "backpack")
    assert_in_place(load(tmp_path))
