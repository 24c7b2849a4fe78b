"""Folders of boxes as people have them: other layouts, stray files, and faults that are named."""

import json
from pathlib import Path

import pytest

import boxed
from boxed import text
from fedjax_bn.data.boxes import assemble, bdd100k, driving, own
from fedjax_bn.data.boxes.bdd100k import CLASSES
from fedjax_bn.data.label_trees import CLASS, crowd
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION

HOW = {"image_size": 16, "progress": False}
ROW = "0 0.5 0.5 0.5 0.5\n"
XML = (
    "<annotation>{}<object><name>cat</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>8</xmax>"
    "<ymax>8</ymax></bndbox></object></annotation>"
)


def picture(path: Path) -> None:
    boxed.picture(path, 16, 16)


def ids_of(path: Path, *boxes, side: int = 16) -> None:
    boxed.instances(path, *boxes, size=(side, side))


def notes_of(root: Path, **how) -> str:
    return " | ".join(own.load(root, **HOW, **how).notes)


def yolo_set(root: Path, *names: str) -> None:
    for name in names:
        picture(root / f"images/{name}.png")
        text(root / f"labels/{name}.txt", ROW)


def test_a_picture_beside_the_domains_is_none_of_them(tmp_path):
    for domain in ("day", "night"):
        yolo_set(tmp_path / domain, "a")
    picture(tmp_path / "preview.png")
    assert [pool.name for pool in own.load(tmp_path, **HOW).pools] == ["day", "night"]
    text(tmp_path / "preview.txt", ROW)
    assert len(own.load(tmp_path, **HOW).pools) == 1


def test_domains_of_two_forms_are_refused_and_one_of_them_may_be_chosen(tmp_path):
    yolo_set(tmp_path / "day", "a")
    picture(tmp_path / "night/images/a.png")
    text(tmp_path / "night/annotations/a.xml", XML.format(""))
    said = r"night is in the form of Pascal VOC's XML, but .*day in that of YOLO's text files"
    with pytest.raises(ValueError, match=said):
        own.load(tmp_path, **HOW)
    assert own.load(tmp_path, domains=("night",), **HOW).classes == ("cat",)
    picture(tmp_path / "rain/images/a.png")
    with pytest.raises(ValueError, match=r"rain has no boxes in a known form.*data\.domains"):
        own.load(tmp_path, domains=("day", "rain"), **HOW)


def test_yolos_names_may_lie_among_labels_and_text_files_without_image_are_counted(tmp_path):
    yolo_set(tmp_path, "a", "b")
    text(tmp_path / "labels/classes.txt", "cat\ndog\n")
    text(tmp_path / "labels/c.txt", ROW)
    text(tmp_path / "README.txt", "about")
    source = own.load(tmp_path, **HOW)
    assert source.classes == ("cat", "dog")
    notes = " | ".join(source.notes)
    assert "1 text files without an image left out, such as" in notes
    assert "labels/c.txt" in notes


@pytest.mark.parametrize("name", ["classes.txt", "data.yaml"])
def test_a_class_named_twice_is_refused(tmp_path, name):
    yolo_set(tmp_path, "a")
    text(tmp_path / name, "names: [cat, cat]" if name == "data.yaml" else "cat\ncat\n")
    with pytest.raises(ValueError, match=f"{name} names 'cat' more than once"):
        own.load(tmp_path, **HOW)


def test_voc_is_divided_by_its_own_lists_and_finds_images_by_the_name_that_xml_says(tmp_path):
    for name in "abc":
        picture(tmp_path / f"JPEGImages/{name}.png")
        said = "<filename>c.png</filename>" if name == "c" else ""
        text(tmp_path / f"Annotations/{'other' if said else name}.xml", XML.format(said))
    for part, name in {"train": "a", "val": "b", "test": "other"}.items():
        text(tmp_path / f"ImageSets/Main/{part}.txt", f"{name}\n")
    pool = own.load(tmp_path, **HOW).pools[0]
    assert dict(zip(pool.names.tolist(), pool.parts.tolist(), strict=True)) == {
        "JPEGImages/a.png": TRAIN,
        "JPEGImages/b.png": VALIDATION,
        "JPEGImages/c.png": TEST,
    }


def test_parts_of_some_images_only_are_not_used_and_that_is_said(tmp_path):
    yolo_set(tmp_path, "train/a", "b")
    source = own.load(tmp_path, **HOW)
    assert source.pools[0].parts is None
    assert any("1 domains whose files name a part" in note for note in source.notes)


def coco(**changes) -> dict:
    return {
        "images": [{"id": 1, "file_name": "a.png"}, {"id": 2, "file_name": "b.png"}],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 8, 8]}],
    } | changes


def test_cocos_json_may_lie_two_folders_deep_beside_its_images(tmp_path):
    for part in ("train", "valid"):
        for name in "ab":
            picture(tmp_path / f"day/export/{part}/{name}.png")
        text(tmp_path / f"day/export/{part}/_annotations.coco.json", coco())
    pool = own.load(tmp_path, **HOW).pools[0]
    assert pool.parts.tolist() == [TRAIN, TRAIN, VALIDATION, VALIDATION]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            coco(images=[{"id": 1, "file_name": "a.png"}] * 2),
            "a.json, images, row 2 has the id 1, as an earlier one",
        ),
        (
            coco(categories=[{"id": 1, "name": "cat"}, {"id": 1, "name": "dog"}]),
            "a.json, categories, row 2 has the id 1, as an earlier one",
        ),
        ({k: v for k, v in coco().items() if k != "annotations"}, "a.json has no 'annotations'"),
    ],
)
def test_cocos_ids_differ_and_no_list_is_missing(tmp_path, content, said):
    for name in "ab":
        picture(tmp_path / f"images/{name}.png")
    text(tmp_path / "a.json", content)
    with pytest.raises(ValueError, match=said):
        own.load(tmp_path, **HOW)


def test_a_polygon_with_nan_behind_its_first_point_is_refused(tmp_path):
    picture(tmp_path / "leftImg8bit/train/ulm/ulm_0_0_leftImg8bit.png")
    polygon = [[0, 0], [float("nan"), 9], [9, 9]]
    content = {"imgWidth": 16, "imgHeight": 16, "objects": [{"label": "car", "polygon": polygon}]}
    text(tmp_path / "gtFine/train/ulm/ulm_0_0_gtFine_polygons.json", content)
    with pytest.raises(ValueError, match=r"polygons.json, row 1: 'polygon' has .*not finite"):
        driving.load_cityscapes(tmp_path, **HOW)


def test_instances_left_out_crowds_and_sizes_that_differ_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(assemble, "_MOST", 2)
    picture(tmp_path / "leftImg8bit/train/ulm/ulm_0_0_leftImg8bit.png")
    label = tmp_path / "gtFine/train/ulm/ulm_0_0_gtFine_instanceIds.png"
    boxes = [(26001, 0, 0, 9, 9), (24, 20, 20, 26, 26), (26002, 10, 0, 12, 2), (7, 0, 30, 9, 32)]
    ids_of(label, *boxes, side=32)
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):  # read, written and read again
        source = driving.load_cityscapes(tmp_path, cache=cache, **HOW)
        notes = " | ".join(source.notes)
        assert (source.pools[0].labels[CLASS] == [2]).all()
        assert "1 crowds" in notes
        assert "1 instances left out, the smallest of images with more than 2" in notes
        assert "1 images of another size than their labels state" in notes


def test_a_config_of_vistas_without_known_classes_is_refused(tmp_path):
    picture(tmp_path / "training/images/a.jpg")
    ids_of(tmp_path / "training/instances/a.png")
    text(tmp_path / "config_v1.2.json", {"labels": [{"name": "construction--flat--road"}]})
    with pytest.raises(ValueError, match=r"config_v1\.2\.json names no class of people or veh"):
        driving.load_vistas(tmp_path, **HOW)


@pytest.mark.parametrize("has_instances", [True, False])
def test_a_group_of_people_of_vistas_is_a_crowd_where_it_has_instances(tmp_path, has_instances):
    names = ["human--person--individual", "human--person--person-group"]
    rows = [{"name": name, "instances": has_instances} for name in names]
    picture(tmp_path / "training/images/a.jpg")
    ids_of(tmp_path / "training/v2.0/instances/a.png", (1, 0, 0, 4, 4), (256 + 2, 4, 4, 9, 9))
    text(tmp_path / "config_v2.0.json", {"labels": rows})
    source = driving.load_vistas(tmp_path, **HOW)
    assert source.pools[0].labels[CLASS].tolist() == ([[crowd(0), 0]] if has_instances else [[0]])


@pytest.mark.parametrize("labels", [{}, "", 0])
def test_labels_of_bdd100k_that_are_no_list_are_refused(tmp_path, labels):
    frames = [{"name": "a.jpg", "attributes": {}, "labels": labels}]
    picture(tmp_path / "images/100k/train/a.jpg")
    for part in ("train", "val"):
        text(tmp_path / f"labels/det_20/det_{part}.json", frames)
    with pytest.raises(ValueError, match=r"det_train.json, frame 1: 'labels' must be a list"):
        bdd100k.load(tmp_path, domains=("all",), classes=CLASSES, **HOW)


def test_the_image_with_too_many_boxes_is_named(tmp_path):
    yolo_set(tmp_path, "a")
    text(tmp_path / "labels/a.txt", ROW * 3)
    notes = notes_of(tmp_path, max_boxes=2)
    assert "1 boxes left out, the smallest of images with more than data.max_boxes=2" in notes
    assert "images/a.png" in notes


# A long JSON list is read value by value as the whole file would be.

VALUES = [12345, -0.5, 'a, ] " é', {"a": [1, {"b": None}]}, [], [[2]], True, 1e30, {}, 7]


@pytest.mark.parametrize("chunk", [1, 2, 7, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_values_are_those_of_the_whole_file_however_little_is_read_at_a_time(
    tmp_path, monkeypatch, chunk, indent
):
    monkeypatch.setattr(bdd100k, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    for values in ([], VALUES, VALUES[:1]):
        path.write_text(json.dumps(values, indent=indent) + "\n", encoding="utf-8-sig")
        assert list(bdd100k._read_rows(path)) == values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}', "must be a list"),
        ("", "must be a list"),
        ("[1, 2", "followed by 'nothing'"),
        ("[1 2]", "followed by '2'"),
        ("[1, ]", "Expecting value"),
        ('[1, {"a": ', "Expecting value"),
        ("[1] 2", "something follows its list"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2**20])
def test_a_damaged_list_is_refused_by_name(tmp_path, monkeypatch, text, said, chunk):
    monkeypatch.setattr(bdd100k, "_CHUNK", chunk)
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.json cannot be read .*{said}"):
        list(bdd100k._read_rows(path))


def test_a_value_without_end_is_not_read_forever(tmp_path, monkeypatch):
    monkeypatch.setattr(bdd100k, "_CHUNK", 4)
    monkeypatch.setattr(bdd100k, "_LONGEST", 100)
    path = tmp_path / "long.json"
    path.write_text('["' + "a" * 1000 + '"]')
    with pytest.raises(ValueError, match=r"long\.json .* over 100 characters"):
        list(bdd100k._read_rows(path))
