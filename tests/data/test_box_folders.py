"""Boxes: read from folders in two forms, and from there into rounds and tests."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import boxed
from boxed import picture, text
from fedjax_bn.data.division.clients import make_clients, pool_clients
from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset, splits, whole
from fedjax_bn.data.labels import BOXES, CLASS, class_counts, crowd, join, strata, take
from fedjax_bn.data.pixels.decode import GREY
from fedjax_bn.data.sampling import (
    by_epochs,
    label_forms,
    point_to,
    stack_clients,
    validation_batches,
)
from fedjax_bn.data.sets.box_folders import load_boxes
from fedjax_bn.data.source import TRAIN, VALIDATION, Source
from fedjax_bn.engine.batches import blank_padding, check_batches
from fedjax_bn.training.evaluation.scoring import SplitBatches
from fedjax_bn.training.rounds import stream_rounds

SIDE = 32
HOW = {"image_size": SIDE, "progress": False}
ROW = "0 0.5 0.5 0.5 0.5\n"


def boxes_in(source: Source, pool: int = 0):
    """(class, box in pixels of a 64 x 32 image) of every image of a pool."""
    labels, images = source.pools[pool].labels, []
    for boxes, classes in zip(labels[BOXES], labels[CLASS], strict=True):
        wide = boxes[classes >= 0] * 64 - (0, 16, 0, 16)  # 32 rows in the middle of 64
        names = [source.classes[k] for k in classes[classes >= 0]]
        images.append(list(zip(names, np.round(wide, 3).tolist(), strict=True)))
    return images


def yolo_set(root, *names) -> None:
    for name in names:
        picture(root / f"images/{name}.png")
        text(root / f"labels/{name}.txt", ROW)


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


def test_the_pixels_of_a_letterboxed_box_are_those_of_the_object(tmp_path):
    for name, (width, height) in {"wide": (64, 32), "high": (20, 40), "small": (14, 10)}.items():
        box = (width // 4, height // 4, width // 2, height // 2)
        picture(tmp_path / f"images/{name}.png", width, height, box)
        x1, y1, x2, y2 = box
        centre = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height)
        row = ["0", *centre, (x2 - x1) / width, (y2 - y1) / height]
        text(tmp_path / f"labels/{name}.txt", " ".join(map(str, row)))
    pool = load_boxes(tmp_path, **HOW).pools[0]
    for image, (x1, y1, x2, y2) in zip(pool.images, pool.labels[BOXES][:, 0] * SIDE, strict=True):
        inside = image[round(y1 + 1) : round(y2 - 1), round(x1 + 1) : round(x2 - 1)]
        assert inside.min() > 128
        dark = image.copy()
        dark[max(0, int(y1) - 2) : int(y2) + 3, max(0, int(x1) - 2) : int(x2) + 3] = 0
        assert dark.max() == GREY  # the bars, and nothing of the object
        assert (image == GREY).all(-1).any()


def test_yolo_folders_have_parts_names_outlines_and_images_without_boxes(tmp_path):
    text(tmp_path / "data.yaml", "names: {0: cat, 1: dog}\nnc: 2\n")
    for part, name in (("train", "a"), ("val", "b"), ("val", "c")):
        picture(tmp_path / f"images/{part}/{name}.png")
    text(tmp_path / "labels/train/a.txt", "0 0.5 0.5 0.25 0.5\n1 0 0 0.5 0 0.5 1\n\n")
    text(tmp_path / "labels/val/b.txt", "")
    source = load_boxes(tmp_path, **HOW)
    pool = source.pools[0]
    assert pool.names.tolist() == ["images/train/a.png", "images/val/b.png", "images/val/c.png"]
    assert pool.parts.tolist() == [TRAIN, VALIDATION, VALIDATION]
    assert boxes_in(source) == [[("cat", [24, 8, 40, 24]), ("dog", [0, 0, 32, 32])], [], []]


@pytest.mark.parametrize("place", ["", "labels/"])
def test_names_of_classes_may_be_a_list_and_parts_of_some_images_are_not_used(tmp_path, place):
    yolo_set(tmp_path, "train/a", "b")
    text(tmp_path / f"{place}classes.txt", "cat\ndog\n")
    text(tmp_path / "._data.yaml", "names: [mac]")
    source = load_boxes(tmp_path, **HOW)
    assert source.classes == ("cat", "dog")
    assert source.pools[0].parts is None


def test_folders_are_domains_and_a_picture_beside_them_is_none(tmp_path):
    for domain in ("day", "night"):
        yolo_set(tmp_path / domain, "a")
    picture(tmp_path / "preview.png")
    assert [pool.name for pool in load_boxes(tmp_path, **HOW).pools] == ["day", "night"]
    text(tmp_path / "preview.txt", ROW)
    assert len(load_boxes(tmp_path, **HOW).pools) == 1


def test_domains_of_two_forms_are_refused_and_one_of_them_may_be_chosen(tmp_path):
    yolo_set(tmp_path / "day", "a")
    for name in "ab":
        picture(tmp_path / f"night/images/{name}.png")
    text(tmp_path / "night/annotations/a.json", coco())
    with pytest.raises(ValueError, match=str(tmp_path / "night")):
        load_boxes(tmp_path, **HOW)
    assert load_boxes(tmp_path, domains=("night",), **HOW).classes == ("cat", "dog")
    picture(tmp_path / "rain/images/a.png")
    with pytest.raises(ValueError, match=str(tmp_path / "rain")):
        load_boxes(tmp_path, domains=("night", "rain"), **HOW)


def test_coco_crowds_stay_such_and_boxes_are_cut_at_the_border_or_left_out_beyond(tmp_path):
    for name in "ab":
        picture(tmp_path / f"day/images/{name}.png")
    text(tmp_path / "day/annotations/instances_train.json", coco())
    text(tmp_path / "day/annotations/person_keypoints_train.json", coco())
    source = load_boxes(tmp_path, **HOW)
    assert boxes_in(source) == [[("cat", [60, 0, 64, 10])], [("dog", [4, 4, 12, 12])]]
    labels = source.pools[0].labels
    assert labels[CLASS].tolist() == [[0, -1], [1, crowd(0)]]
    assert labels[BOXES][1, 1].tolist() == [0, 0.25, 1, 0.75]
    notes = " | ".join(source.notes)
    assert all(count in notes for count in ("1 crowds", "2 boxes without area", "1 boxes that"))
    dogs = load_boxes(tmp_path, classes=("dog",), **HOW)
    assert boxes_in(dogs) == [[], [("dog", [4, 4, 12, 12])]]
    many = [{"image_id": 9, "category_id": 3, "bbox": [0, 0, 1, 1]}] * 99 + coco()["annotations"]
    text(tmp_path / "day/annotations/instances_train.json", coco(annotations=many))
    largest = load_boxes(tmp_path, **HOW).pools[0].labels[CLASS][1]
    assert largest.tolist() == [0] * 98 + [1, crowd(0)]


NAN_BOX = [{"image_id": 7, "category_id": 3, "bbox": [0, 0, float("nan"), 1]}]
ESCAPE = {"images": [{"id": 7, "file_name": "../a.png"}], "annotations": []}


@pytest.mark.parametrize(
    ("name", "content", "culprit"),
    [
        ("labels/a.txt", "2 .5 .5 .1 .1", "line 1"),
        ("labels/a.txt", f"{ROW}0 .5 .5 .1", "line 2"),
        ("a.json", coco(annotations=NAN_BOX), "without area"),
        ("a.json", coco(images=[{"id": 7, "file_name": "a.png"}]), "9"),
        ("a.json", coco(images=[{"id": 7, "file_name": "a.png"}] * 2), "id"),
        ("a.json", coco(annotations=[{"image_id": 7, "category_id": 3}]), "bbox"),
        ("a.json", coco(**ESCAPE), "../a.png"),
        ("a.json", '{"images": [', "JSONDecodeError"),
    ],
)
def test_bad_labels_are_refused_by_file(tmp_path, name, content, culprit):
    for image in "ab" if name == "a.json" else "a":
        picture(tmp_path / f"images/{image}.png")
    text(tmp_path / "classes.txt", "cat\ndog")
    text(tmp_path / name, content)
    with pytest.raises(ValueError, match=re.escape(culprit)) as error:
        load_boxes(tmp_path, **HOW)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_images_folders_and_classes_are_named(tmp_path):
    picture(tmp_path / "set/images/a.png")
    text(tmp_path / "set/a.json", coco())
    with pytest.raises(FileNotFoundError, match=r"b\.png"):
        load_boxes(tmp_path / "set", **HOW)
    picture(tmp_path / "set/images/b.png")
    with pytest.raises(ValueError, match="elk"):
        load_boxes(tmp_path / "set", classes=("elk",), **HOW)
    with pytest.raises(FileNotFoundError, match="dawn"):
        load_boxes(tmp_path, domains=("dawn",), **HOW)
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "nowhere")):
        load_boxes(tmp_path / "nowhere", **HOW)


def equal(one, other) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def draw_of(sizes, number):
    key, client = jax.random.fold_in(jax.random.key(0), number), jnp.arange(2, dtype=jnp.int32)
    return client, by_epochs(2, (1,))(sizes, client, 5, key)


PARTS = [boxed.split(5, 0), boxed.split(3, 1)]


@pytest.fixture(scope="module")
def resident():
    """Both clients on the device, and how a round draws from them."""
    data = stack_clients(PARTS)
    return data, jax.jit(functools.partial(draw_of, data.sizes))


def test_a_round_trains_every_image_with_its_own_boxes(resident):
    data, draw = resident
    batches = jax.device_get(jax.jit(point_to)(data, draw(0)[1]))
    check_batches(batches, 2, 1)
    for k, s, b in np.argwhere(batches["valid"]):
        number = int(batches["image"][k, s, b])
        own = take(PARTS[k].labels, number)
        assert equal(own, jax.tree.map(lambda leaf, at=(k, s, b): leaf[at], batches["label"]))
    forms = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batches["label"])
    wanted = label_forms(PARTS[0], batches["valid"].shape)
    assert forms == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), wanted)


def test_streamed_boxes_are_those_on_the_device(resident):
    pytest.importorskip("grain", reason="the stream needs grain, of the extra [data]")
    data, draw = resident
    streamed = next(stream_rounds(PARTS, draw, 0, 1, np.arange(2)))
    kept = jax.jit(lambda: blank_padding(point_to(data, draw(0)[1])))()
    assert equal(streamed["label"], kept["label"])
    blocks = (jax.device_get(block.labels) for block in SplitBatches(PARTS, 2).kept_within(1e-9)())
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *blocks)
    assert equal(joined, jax.device_get(SplitBatches(PARTS, 2).all_at_once().labels))


def test_validation_and_test_batches_hold_the_boxes_in_order():
    validation = validation_batches(PARTS, 2)
    tested = SplitBatches(PARTS, 2).all_at_once()
    for k, part in enumerate(PARTS):
        for name, leaf in part.labels.items():
            count, kept = len(leaf), np.asarray(validation["label"][name])[k]
            flat = kept.reshape(-1, *kept.shape[2:])
            assert np.array_equal(flat[:count], leaf)
            assert not flat[count:].any()
            batches = np.asarray(tested.labels[name])[np.asarray(tested.batch)[tested.client == k]]
            assert np.array_equal(batches.reshape(-1, *leaf.shape[1:])[:count], leaf)


def test_clients_own_images_with_their_boxes_and_every_image_once():
    data = boxed.source(20, 30)
    internal, unseen = make_clients(data, target="b", validation=0.2, clients_per_domain=3)
    owned = []
    for domain in internal.domains:
        for name, part in splits(domain):
            numbers = np.asarray(part.images)[:, 0, 0, 0]
            assert equal(part.labels, take(data.pools[0].labels, numbers))
            first = name == "validation" and domain is internal.domains[0]  # they share it
            owned += numbers.tolist() * (name == "train" or first)
    assert sorted(owned) == list(range(20))
    assert equal(
        whole(unseen[0]).labels,
        take(data.pools[1].labels, np.asarray(whole(unseen[0]).images)[:, 0, 0, 0]),
    )
    together = pool_clients(internal)[0].domains[0].train
    numbers = np.asarray(together.images)[:, 0, 0, 0]
    assert equal(together.labels, take(data.pools[0].labels, numbers))


def test_splits_keep_the_most_frequent_class_of_an_image_in_proportion():
    labels = {CLASS: np.array([[1, 0, 1], [2, 0, -1], [-1, -1, -1]], np.int32)}
    assert strata(labels).tolist() == [1, 0, -1]
    assert class_counts(labels, 4).tolist() == [2, 2, 1, 0]


def test_labels_with_fewer_boxes_an_image_are_padded_when_joined():
    few, many = boxed.split(2, 0, most=1).labels, boxed.split(3, 1, most=4).labels
    joined = join([few, many])
    assert equal(take(joined, np.array([2, 3, 4])), many)
    assert joined[BOXES].shape == (5, 4, 4)
    assert (joined[CLASS][:2, 1:] == -1).all()
    assert not joined[BOXES][:2, 1:].any()


def dataset_with(labels) -> Dataset:
    part = Split(np.zeros((len(labels[CLASS]), 2, 2, 3), np.uint8), labels)
    return Dataset("toy", 3, (Domain("a", part, None, part),), (0.0,), (1.0,))


def test_the_hash_of_the_data_depends_on_every_box():
    labels = boxed.split(4).labels
    moved = {name: leaf.copy() for name, leaf in labels.items()}
    moved[BOXES][-1, -1, -1] += 0.01
    other = labels | {CLASS: np.where(labels[CLASS] == 0, 1, labels[CLASS])}
    assert len({fingerprint(dataset_with(one)) for one in (labels, moved, other)}) == 3


@pytest.mark.parametrize(
    ("box", "class_"),
    [
        ((0.1, 0.1, 0.1, 0.4), 0),
        ((-0.1, 0.1, 0.2, 0.4), 0),
        ((0.1, 0.1, float("nan"), 0.4), 0),
        ((0.1, 0.1, 0.2, 0.4), 3),
    ],
)
def test_a_wrong_box_is_named_before_anything_is_trained(box, class_):
    labels = {BOXES: np.zeros((2, 1, 4), np.float32), CLASS: np.full((2, 1), -1, np.int32)}
    check_dataset(dataset_with(labels))  # images without boxes are sound
    labels[BOXES][1, 0], labels[CLASS][1, 0] = box, class_
    with pytest.raises(ValueError, match=f"class {class_} .* image 1, box 0"):
        check_dataset(dataset_with(labels))
