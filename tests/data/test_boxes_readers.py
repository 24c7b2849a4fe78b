"""Boxes in every published form: two images each, written by the tests."""

from pathlib import Path

import numpy as np
import pytest

from boxed import instances, picture, text
from fedjax_bn.data.boxes import bdd100k, driving, own
from fedjax_bn.data.boxes.assemble import _boxes_of
from fedjax_bn.data.label_trees import BOXES, CLASS, crowd
from fedjax_bn.data.pixels.decode import GREY
from fedjax_bn.data.source import TRAIN, VALIDATION, Source

SIDE = 32
HOW = {"image_size": SIDE, "progress": False}


def found(source: Source, pool: int = 0):
    """(class, box in pixels of a 64 x 32 image) of every image of a pool."""
    labels, images = source.pools[pool].labels, []
    for boxes, classes in zip(labels[BOXES], labels[CLASS], strict=True):
        wide = boxes[classes >= 0] * 64 - (0, 16, 0, 16)  # 32 rows in the middle of 64
        names = [source.classes[k] for k in classes[classes >= 0]]
        images.append(list(zip(names, np.round(wide, 3).tolist(), strict=True)))
    return images


def voc(*boxes, size=(64, 32)) -> str:
    rows = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax>"
        f"<ymax>{d}</ymax></bndbox></object>"
        for name, a, b, c, d in boxes
    )
    return (
        f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{rows}"
        "</annotation>"
    )


def test_the_pixels_of_a_letterboxed_box_are_those_of_the_object(tmp_path):
    for name, (width, height) in {"wide": (64, 32), "high": (20, 40), "small": (14, 10)}.items():
        box = (width // 4, height // 4, width // 2, height // 2)
        picture(tmp_path / f"images/{name}.png", width, height, box)
        x1, y1, x2, y2 = box
        centre = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height)
        row = ["0", *centre, (x2 - x1) / width, (y2 - y1) / height]
        text(tmp_path / f"labels/{name}.txt", " ".join(map(str, row)))
    pool = own.load(tmp_path, **HOW).pools[0]
    for image, (x1, y1, x2, y2) in zip(pool.images, pool.labels[BOXES][:, 0] * SIDE, strict=True):
        inside = image[round(y1 + 1) : round(y2 - 1), round(x1 + 1) : round(x2 - 1)]
        assert inside.min() > 128
        dark = image.copy()
        dark[max(0, int(y1) - 2) : int(y2) + 3, max(0, int(x1) - 2) : int(x2) + 3] = 0
        assert dark.max() == GREY  # the bars, and nothing of the object
        assert (image == GREY).all(-1).any()


def test_voc_folders_are_domains_and_their_corners_are_counted_from_one(tmp_path):
    for domain, box in {"day": ("cat", 1, 1, 8, 8), "night": ("dog", 33, 17, 64, 32)}.items():
        for k in "ab":
            picture(tmp_path / domain / f"images/{k}.jpg")
            text(tmp_path / domain / f"annotations/{k}.xml", voc(box))
    picture(tmp_path / "day/images/c.jpg")
    source = own.load(tmp_path, **HOW)
    assert [pool.name for pool in source.pools] == ["day", "night"]
    assert source.classes == ("cat", "dog")
    assert found(source) == [[("cat", [0, 0, 8, 8])]] * 2
    assert found(source, 1) == [[("dog", [32, 16, 64, 32])]] * 2
    assert any(
        "1 images without an XML file left out, such as day/images/c" in n for n in source.notes
    )
    only = own.load(tmp_path, domains=("night",), classes=("dog",), **HOW)
    assert found(only) == [[("dog", [32, 16, 64, 32])]] * 2


def test_yolo_folders_have_parts_names_outlines_and_images_without_boxes(tmp_path):
    text(tmp_path / "data.yaml", "names: {0: cat, 1: dog}\nnc: 2\n")
    for part, name in (("train", "a"), ("val", "b"), ("val", "c")):
        picture(tmp_path / f"images/{part}/{name}.png")
    text(tmp_path / "labels/train/a.txt", "0 0.5 0.5 0.25 0.5\n1 0 0 0.5 0 0.5 1\n\n")
    text(tmp_path / "labels/val/b.txt", "")
    source = own.load(tmp_path, **HOW)
    pool = source.pools[0]
    assert pool.names.tolist() == ["images/train/a.png", "images/val/b.png", "images/val/c.png"]
    assert pool.parts.tolist() == [TRAIN, VALIDATION, VALIDATION]
    assert found(source) == [[("cat", [24, 8, 40, 24]), ("dog", [0, 0, 32, 32])], [], []]
    assert any("3 images" in note and "2 of them without boxes" in note for note in source.notes)


def test_linked_folders_are_followed_and_a_link_to_itself_is_no_trap(tmp_path):
    picture(tmp_path / "elsewhere/train2017/a.jpg")
    text(tmp_path / "set/labels/train2017/a.txt", "0 0.5 0.5 0.5 0.5")
    (tmp_path / "set/images").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set/images/train2017/again").symlink_to(tmp_path / "set")
    source = own.load(tmp_path / "set", **HOW)
    assert source.pools[0].names.tolist() == ["images/train2017/a.jpg"]
    assert source.pools[0].parts.tolist() == [TRAIN]
    assert found(source) == [[("0", [16, 8, 48, 24])]]


@pytest.mark.parametrize("name", ["annotations/._labels.json", "@eaDir/a.json"])
def test_companions_of_other_systems_are_no_labels_of_coco(tmp_path, name):
    for image in "ab":
        picture(tmp_path / f"images/{image}.png")
    text(tmp_path / "annotations/labels.json", coco())
    before = own.load(tmp_path, **HOW)
    text(tmp_path / name, "\0\5\26\7")
    after = own.load(tmp_path, **HOW)
    assert (after.key, after.notes) == (before.key, before.notes)


def test_companions_of_other_systems_name_no_classes_of_yolo(tmp_path):
    picture(tmp_path / "images/a.png")
    text(tmp_path / "labels/a.txt", "0 0.5 0.5 0.5 0.5")
    text(tmp_path / "data.yaml", "names: [cat]")
    text(tmp_path / "._data.yaml", "names: [mac]")
    assert own.load(tmp_path, **HOW).classes == ("cat",)


def coco(**changes) -> dict:
    return {
        "images": [
            {"id": 7, "file_name": "a.png", "width": 64, "height": 32},
            {"id": 9, "file_name": "b.png", "width": 64, "height": 32},
        ],
        "categories": [{"id": 3, "name": "cat"}, {"id": 5, "name": "dog"}],
        "annotations": [
            {"image_id": 9, "category_id": 5, "bbox": [4, 4, 8, 8], "iscrowd": 0},
            {"image_id": 9, "category_id": 3, "bbox": [0, 0, 64, 32], "iscrowd": 1},
            {"image_id": 7, "category_id": 3, "bbox": [60, 0, 10, 10]},
            {"image_id": 7, "category_id": 3, "bbox": [70, 0, 10, 10]},
            {"image_id": 7, "category_id": 3, "bbox": [1, 1, 0, 10]},
        ],
    } | changes


def test_coco_crowds_stay_such_and_boxes_are_cut_at_the_border_or_left_out_beyond(tmp_path):
    for name in "ab":
        picture(tmp_path / f"day/images/{name}.png")
    text(tmp_path / "day/annotations/instances_train.json", coco())
    text(tmp_path / "day/annotations/person_keypoints_train.json", coco())
    source = own.load(tmp_path, **HOW)
    assert found(source) == [[("cat", [60, 0, 64, 10])], [("dog", [4, 4, 12, 12])]]
    labels = source.pools[0].labels
    assert labels[CLASS].tolist() == [[0, -1], [1, crowd(0)]]
    assert labels[BOXES][1, 1].tolist() == [0, 0.25, 1, 0.75]
    notes = " | ".join(source.notes)
    assert "1 crowds" in notes
    assert "2 boxes without area, or outside their image, left out, such as" in notes
    assert "annotations, row 4" in notes
    assert "1 boxes that reach out of their image cut at its border" in notes


def test_an_image_with_too_many_boxes_keeps_the_largest_and_the_others_are_counted(tmp_path):
    for name in "ab":
        picture(tmp_path / f"images/{name}.png")
    sizes = [4, 20, 8, 16]
    rows = [{"image_id": 7, "category_id": 3, "bbox": [0, 0, s, s]} for s in sizes]
    text(tmp_path / "instances.json", coco(annotations=rows))
    source = own.load(tmp_path, max_boxes=2, **HOW)
    assert [box[2] for _, box in found(source)[0]] == [20, 16]
    assert any("2 boxes left out, the smallest" in note for note in source.notes)


def bdd(root: Path, edition: str, frames: dict[str, list]) -> Path:
    for part, rows in frames.items():
        text(root / edition.format(part), rows)
        for frame in rows:
            picture(root / "images/100k" / part / frame["name"])
    return root


def frame(name: str, scene: str, weather: str, *boxes, **more) -> dict:
    rows = [
        {"category": c, "box2d": {"x1": a, "y1": b, "x2": x, "y2": y}} for c, a, b, x, y in boxes
    ]
    attributes = {"scene": scene, "weather": weather, "timeofday": "daytime"}
    return {"name": name, "attributes": attributes, "labels": rows} | more


@pytest.mark.parametrize(
    ("edition", "person"),
    [
        ("labels/det_20/det_{}.json", "pedestrian"),
        ("labels/bdd100k_labels_images_{}.json", "person"),
    ],
)
def test_both_editions_of_bdd100k_give_table_3s_domains(tmp_path, edition, person):
    lane = {"category": "lane", "poly2d": [{"vertices": [[0, 0]]}]}
    first = frame("a.jpg", "highway", "clear", (person, 0, 0, 15, 7), ("car", 32, 16, 70, 31))
    first["labels"] = [lane, *first["labels"], {"category": "other vehicle", "box2d": {}}]
    frames = {
        "train": [first, frame("b.jpg", "highway", "rainy", ("bus", 2, 2, 9, 9))],
        "val": [
            frame("c.jpg", "city street", "foggy", ("traffic light", 0, 0, 3, 3), labels=None),
            frame("d.jpg", "residential", "undefined", ("bike", 0, 0, 3, 3)),
            frame("e.jpg", "tunnel", "clear", ("car", 0, 0, 3, 3)),
        ],
    }
    del frames["val"][0]["labels"]
    source = bdd100k.load(bdd(tmp_path, edition, frames), **HOW)
    assert [pool.name for pool in source.pools] == list(bdd100k.TABLE_3)
    assert found(source) == [[("person", [0, 0, 16, 8]), ("car", [32, 16, 64, 32])]]
    assert found(source, 2) == [[]]
    assert [pool.parts for pool in source.pools][1:] == [np.array([TRAIN]), None, None]
    notes = " | ".join(source.notes)
    assert "1 frames that are in no domain" in notes
    assert "1 frames without labels" in notes
    assert "1 boxes of other person, other vehicle" in notes
    pairs = bdd100k.load(tmp_path, domains=("weather", "scene"), **HOW)
    assert "rainy highway" in [pool.name for pool in pairs.pools]
    lights = bdd100k.load(tmp_path, domains=("all",), classes=("traffic light", "bus"), **HOW)
    assert lights.classes == ("traffic light", "bus")
    assert [name for image in found(lights) for name, _ in image] == ["bus"]


def write_cityscapes(root: Path, clear_end: str) -> Path:
    scene = "leftImg8bit/train/ulm/ulm_000000_000019"
    picture(root / f"{scene}_leftImg8bit.png")
    foggy = scene.replace("leftImg8bit", "leftImg8bit_foggy")
    picture(root / f"{foggy}_leftImg8bit_foggy_beta_0.02.png")
    label = root / "gtFine/train/ulm/ulm_000000_000019_gtFine_"
    if clear_end == "polygons":
        square = [[8, 4], [20, 4], [20, 30]]
        objects = [
            {"label": "road", "polygon": [[0, 0], [64, 32]]},
            {"label": "car", "polygon": square},
            {"label": "persongroup", "polygon": square},
        ]
        text(Path(f"{label}polygons.json"), {"imgWidth": 64, "imgHeight": 32, "objects": objects})
    else:
        car, group = (26001, 8, 4, 20, 30), (24, 40, 4, 60, 30)
        instances(Path(f"{label}instanceIds.png"), (7, 0, 0, 64, 2), car, group)
    return root


@pytest.mark.parametrize("form", ["polygons", "instanceIds"])
def test_cityscapes_boxes_serve_clear_and_foggy_images_of_one_name(tmp_path, form):
    source = driving.load_cityscapes(
        write_cityscapes(tmp_path, form), cache=tmp_path / "cache", **HOW
    )
    assert [pool.name for pool in source.pools] == ["cityscapes", "foggy"]
    assert found(source) == found(source, 1) == [[("car", [8, 4, 20, 30])]]
    classes = source.pools[0].labels[CLASS][0].tolist()
    assert classes == ([2, crowd(0)] if form == "polygons" else [crowd(0), 2])  # largest first
    assert source.pools[0].names.tolist() == source.pools[1].names.tolist()
    again = driving.load_cityscapes(tmp_path, domains=("foggy",), cache=tmp_path / "cache", **HOW)
    assert found(again) == found(source)


def write_vistas(root: Path, inner: str, config: str, person: str) -> Path:
    names = ["construction--flat--road", person, "object--vehicle--on-rails"]
    text(root / config, {"labels": [{"name": name, "instances": True} for name in names]})
    picture(root / "training/images/a.jpg")
    boxes = (5, 0, 0, 64, 32), (256 + 1, 0, 0, 8, 8), (512 + 3, 30, 10, 64, 32)
    instances(root / "training" / inner / "a.png", *boxes)
    return root


@pytest.mark.parametrize(
    ("inner", "config", "person"),
    [
        ("instances", "config_v1.2.json", "human--person"),
        ("v2.0/instances", "config_v2.0.json", "human--person--individual"),
    ],
)
def test_both_versions_of_vistas_are_read_by_their_config(tmp_path, inner, config, person):
    source = driving.load_vistas(write_vistas(tmp_path, inner, config, person), **HOW)
    assert sorted(found(source)[0]) == [("person", [0, 0, 8, 8]), ("train", [30, 10, 64, 32])]


def test_table_2s_three_datasets_are_three_domains_of_the_same_eight_classes(tmp_path):
    write_cityscapes(tmp_path / "cityscapes", "polygons")
    write_vistas(tmp_path / "vistas", "instances", "config_v1.2.json", "human--person")
    frames = {"train": [frame("a.jpg", "tunnel", "clear", ("motor", 0, 0, 7, 7))], "val": []}
    bdd(tmp_path / "bdd100k", "labels/det_20/det_{}.json", frames)
    source = driving.load(tmp_path, **HOW)
    assert [pool.name for pool in source.pools] == list(driving.DOMAINS)
    assert found(source, 2) == [[("motorcycle", [0, 0, 8, 8])]]


def test_the_box_of_an_instance_holds_all_its_pixels_and_no_more():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, (9, 11)) * 1000
    for value, (x1, y1, x2, y2) in _boxes_of(ids).items():
        rows, columns = np.nonzero(ids == value)
        assert (x1, y1, x2, y2) == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    assert set(_boxes_of(ids)) == {1000, 2000, 3000, 4000}


BAD_XML = voc(("cat", 1, 1, 8, "nan"))
BOMB = '<!DOCTYPE a [<!ENTITY b "bb">]><annotation>&b;</annotation>'
YAML = ("data.yaml", "names: [cat, dog]")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"annotations/a.xml": BAD_XML}, r"row 1 has the box \[0.0, 0.0, 8.0, nan\].*finite"),
        ({"annotations/a.xml": BOMB}, "a.xml cannot be read .*document type"),
        ({"annotations/a.xml": "<annotation>"}, "a.xml cannot be read"),
        ({"annotations/a.xml": voc(("cat", 1, 1, 8, "x"))}, "a.xml, row 1: <ymax> is 'x'"),
        ({"annotations/z.xml": voc(("cat", 1, 1, 8, 8))}, "z.xml has no image of its name"),
        ({"labels/a.txt": "2 .5 .5 .1 .1", YAML[0]: YAML[1]}, r"row 1 has class 2; .* 0\.\.1"),
        ({"labels/a.txt": "0 .5 .5 .1 .1\n0.5 .5 .5 .1 .1"}, "a.txt, row 2 has class 0.5"),
        ({"annotations/a.xml": voc(size=("inf", 2))}, "a.xml says that its image has inf x 2"),
        ({"labels/a.txt": "123456789 .5 .5 .1 .1"}, "row 1 has class 123456789; .* 0..9999"),
        ({"labels/a.txt": "0 320 .5 .1 .1"}, "a.txt, row 1 has numbers outside"),
        ({"labels/a.txt": "0 nan .5 .1 .1"}, "a.txt, row 1 has a number that is not finite"),
        ({"labels/a.txt": "0 .5 .5 .1"}, "a.txt, row 1 has 4 numbers"),
        ({"labels/a.txt": "cat .5 .5 .1 .1"}, "a.txt, row 1 holds 'cat"),
        ({"a.json": coco()}, "1 of 2 labelled images are not in .*b.png"),
        ({"a.json": coco(categories=[{"id": 3, "name": "cat"}])}, "row 1 is of category 5"),
        ({"a.json": coco(images=[{"id": 7, "file_name": "a.png"}])}, "row 1 is of image 9"),
        ({"a.json": coco(annotations={})}, "'annotations' must be a list"),
        ({"a.json": coco(annotations=[{"image_id": 7, "category_id": 3}])}, "row 1 has no 'bbox'"),
        (
            {"a.json": coco(images=[{"id": 7, "file_name": "../a.png"}], annotations=[])},
            "leads out",
        ),
        (
            {"a.json": coco(images=[{"id": 7, "file_name": "\ud800.png"}], annotations=[])},
            "a.json, images, row 1: 'file_name' .*surrogate",
        ),
        ({"a.json": '{"images": ['}, "a.json cannot be read"),
        ({}, "has no boxes in a known form"),
        ({"labels/a.txt": ""}, "none with a box"),
        ({"labels/a.txt": "0 .5 .5 .1 .1", "images/b.png": "no image"}, "images/b.png"),
    ],
)
def test_bad_labels_are_refused_by_file_and_row(tmp_path, files, said):
    picture(tmp_path / "images/a.png")
    for name, content in files.items():
        text(tmp_path / name, content)
    with pytest.raises((ValueError, FileNotFoundError), match=said) as error:
        own.load(tmp_path, **HOW)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"category": "tram"}, "frame 1, label 1 is of category 'tram', which BDD100K does not"),
        ({"box2d": {"x1": 0}}, "label 1: 'box2d' has no 'y1'"),
        (
            {"box2d": {"x1": "0", "y1": 0, "x2": 1, "y2": 1}},
            "label 1: 'box2d': 'x1' must be a number",
        ),
    ],
)
def test_a_wrong_label_of_bdd100k_is_named(tmp_path, change, said):
    one = frame("a.jpg", "tunnel", "clear", ("car", 0, 0, 7, 7))
    one["labels"][0] |= change
    bdd(tmp_path, "labels/det_20/det_{}.json", {"train": [one], "val": []})
    with pytest.raises(ValueError, match=said):
        bdd100k.load(tmp_path, domains=("all",), **HOW)


def test_half_of_a_character_in_a_name_of_bdd100k_is_named(tmp_path):
    image = frame("a.jpg", "tunnel", "clear", ("car", 0, 0, 7, 7))
    bdd(tmp_path, "labels/det_20/det_{}.json", {"train": [image], "val": []})
    labels = tmp_path / "labels/det_20/det_train.json"
    labels.write_text(labels.read_text().replace("a.jpg", r"\udfff.jpg"))
    with pytest.raises(ValueError, match=r"frame 1: 'name' .*surrogate"):
        bdd100k.load(tmp_path, domains=("all",), **HOW)


def test_two_hundred_real_photographs_are_read_from_voc(shared, tmp_path):
    source = own.load(shared / "data/raccoon", image_size=16, progress=False)
    assert source.classes == ("raccoon",)
    labels = source.pools[0].labels
    assert len(source.pools[0].images) == 200
    assert (labels[CLASS] >= 0).sum() == 217
    assert not any(
        "left out" in note or "cut" in note or "another size" in note for note in source.notes
    )
