"""Boxes from predictions, their mean average precision, and a detector's run."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import boxed
import runs
from detectors import ANCHORS, CELLS, HEIGHT, WIDTH, outputs, sigmoid
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.report.page import write_report
from fedjax_bn.run import evaluate as evaluate_finished
from fedjax_bn.run.evaluate import Request
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.model import MODELS, choose_task
from fedjax_bn.tasks.detection.found_boxes import BoxPicture, found_boxes, judge_boxes
from fedjax_bn.tasks.detection.task import (
    THRESHOLDS,
    DetectedImages,
    Detections,
    Keeping,
    decode_predictions,
    detection,
    mean_average_precision,
    suppress,
)
from fedjax_bn.training import score_tables as tables


def test_predictions_are_decoded_as_the_formulas_say(x64):
    outs = outputs(images=1)
    boxes, scores = jax.jit(lambda outs: decode_predictions(outs, ANCHORS))(outs)
    n = 0
    for out, cells, sizes, stride in zip(outs, CELLS, *ANCHORS, strict=True):
        for row in range(cells[0]):
            for column in range(cells[1]):
                for anchor, (aw, ah) in zip(out[0, row, column], sizes, strict=True):
                    x, y, w, h = 2 * sigmoid(anchor[:4])
                    x, y = (x - 0.5 + column) * stride, (y - 0.5 + row) * stride
                    w, h = w**2 * aw, h**2 * ah
                    corners = np.array([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
                    corners = np.clip(corners / (WIDTH, HEIGHT, WIDTH, HEIGHT), 0, 1)
                    np.testing.assert_allclose(boxes[0, n], corners, rtol=1e-12, atol=1e-15)
                    score = sigmoid(anchor[4]) * sigmoid(anchor[5:])
                    np.testing.assert_allclose(scores[0, n], score, rtol=1e-12)
                    n += 1
    assert n == boxes.shape[1]


def overlap(a, b):
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0) * max(height, 0)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def loop_suppress(boxes, scores, keeping):
    pairs = [(-s, n, c) for n, row in enumerate(scores) for c, s in enumerate(row)]
    if keeping.best_class:
        pairs = [(-row.max(), n, row.argmax()) for n, row in enumerate(scores)]
    kept = []
    for score, n, c in sorted(pairs)[: keeping.candidates]:
        beaten = any(d == c and overlap(boxes[m], boxes[n]) > keeping.overlap for _, m, d in kept)
        if -score > keeping.score and not beaten:
            kept.append((-score, n, c))
    return kept[: keeping.detections]


@pytest.mark.parametrize(
    "keeping",
    [
        Keeping(score=0.3, overlap=0.4, candidates=500, detections=100),
        Keeping(score=0.3, overlap=0.4, best_class=True, candidates=500, detections=40),
        Keeping(score=0.001, overlap=0.2, candidates=60, detections=7),
    ],
)
def test_suppression_is_that_of_a_loop(keeping):
    rng = np.random.default_rng(1)
    low = rng.uniform(0, 0.6, (2, 150, 2))
    boxes = np.concatenate([low, low + rng.uniform(0.1, 0.4, (2, 150, 2))], -1)
    boxes, scores = boxes.astype(np.float32), rng.random((2, 150, 3), np.float32)
    ours = jax.jit(lambda b, s: suppress(b, s, keeping))(boxes, scores)
    for i in range(2):
        theirs = loop_suppress(boxes[i].astype(float), scores[i], keeping)
        count = len(theirs)
        assert count > 3
        np.testing.assert_array_equal(ours.scores[i, :count], [s for s, _, _ in theirs])
        np.testing.assert_array_equal(ours.classes[i, :count], [c for _, _, c in theirs])
        np.testing.assert_array_equal(ours.boxes[i, :count], [boxes[i, n] for _, n, _ in theirs])
        assert (np.asarray(ours.classes[i, count:]) == -1).all()
        assert not np.asarray(ours.scores[i, count:]).any()


def found(seed, images=20, most=12, depth=30, classes=5, crowds=False):
    """Random boxes; detections are moved copies of them and others from nowhere."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 0.7, (images, most, 2))
    true = np.concatenate([low, low + rng.uniform(0.05, 0.3, (images, most, 2))], -1)
    number = rng.integers(-1, classes, (images, most)).astype(np.int32)
    number[:3] = -1  # images without boxes
    source = rng.integers(0, most, (images, depth))
    boxes = np.take_along_axis(true, source[..., None], 1) + rng.normal(0, 0.02, (images, depth, 4))
    boxes = np.concatenate([boxes[..., :2], np.maximum(boxes[..., 2:], boxes[..., :2] + 0.01)], -1)
    guess = np.take_along_axis(number, source, 1)
    guess = np.where(rng.random(guess.shape) < 0.3, rng.integers(0, classes, guess.shape), guess)
    if crowds:
        number = np.where(rng.random(number.shape) < 0.2, -2 - np.abs(number), number)
    scores = np.round(rng.random((images, depth)), 2)  # with ties
    return DetectedImages(boxes, scores, guess, true, number)


def by_coco(found, classes=5):
    """mAP50-95 and mAP50 in percent of pycocotools."""
    api = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed")
    evaluation = pytest.importorskip("pycocotools.cocoeval")

    def rows(boxes, numbers, scores=None):
        for image, (corners, number) in enumerate(zip(boxes, numbers, strict=True)):
            for j, (box, c) in enumerate(zip(corners, number, strict=True)):
                if c == -1:
                    continue
                crowd, side = int(c < -1), box[2:] - box[:2]
                row = {"image_id": image + 1, "category_id": int(-2 - c if crowd else c) + 1}
                row |= {"bbox": [*box[:2], *side], "area": side.prod(), "iscrowd": crowd}
                yield row | ({} if scores is None else {"score": scores[image, j]})

    with contextlib.redirect_stdout(io.StringIO()):
        truth = api.COCO()
        truth.dataset = {
            "images": [{"id": i + 1} for i in range(len(found.boxes))],
            "categories": [{"id": c + 1} for c in range(classes)],
            "annotations": [
                {"id": i + 1} | row
                for i, row in enumerate(rows(found.true_boxes, found.true_classes))
            ],
            "info": {},
        }
        truth.createIndex()
        guesses = truth.loadRes(list(rows(found.boxes, found.classes, found.scores)))
        judged = evaluation.COCOeval(truth, guesses, "bbox")
        judged.params.areaRng, judged.params.areaRngLbl = [[0, 1e10]], ["all"]
        judged.evaluate()
        judged.accumulate()
    precision = judged.eval["precision"][..., 0, -1]  # threshold, recall, class
    precision = precision[:, :, (precision > -1).all((0, 1))]
    return 100 * precision.mean(), 100 * precision[0].mean()


@pytest.mark.parametrize(("seed", "crowds"), [(0, False), (1, True)])
def test_mean_average_precision_is_that_of_pycocotools(seed, crowds):
    some = found(seed, crowds=crowds)
    whole, half = by_coco(some)
    assert 5 < whole < half < 95
    np.testing.assert_allclose(mean_average_precision(some), half, rtol=1e-12)
    np.testing.assert_allclose(mean_average_precision(some, THRESHOLDS), whole, rtol=1e-12)


def test_only_the_best_hundred_of_a_class_and_image_count():
    some = found(0, images=8, depth=160, classes=1)
    far = np.broadcast_to([2.0, 2.0, 3.0, 3.0], (8, 110, 4))
    some = some._replace(
        boxes=np.concatenate([far, some.boxes[:, 110:]], 1),
        classes=np.zeros((8, 160), np.int32),
        scores=np.broadcast_to(np.linspace(1, 0, 160), (8, 160)),
    )
    assert mean_average_precision(some) == by_coco(some, classes=1)[1] == 0
    shorter = some._replace(boxes=some.boxes[:, 20:], scores=some.scores[:, 20:])
    assert mean_average_precision(shorter._replace(classes=some.classes[:, 20:])) > 0


def kept_of(some, size):
    """Images as batches of what the task keeps; the last batch is padded with images of class 0."""
    count = -(-len(some.boxes) // size)

    def cut(leaf):
        leaf = np.pad(leaf, [(0, count * size - len(leaf))] + [(0, 0)] * (leaf.ndim - 1))
        return leaf.reshape(count, size, *leaf.shape[1:])

    parts = DetectedImages(*map(cut, some))
    label = {"boxes": parts.true_boxes, "class": parts.true_classes}
    valid = (np.arange(count * size) < len(some.boxes)).reshape(count, size)
    return Detections(*parts[:3]), label, valid


def test_the_score_is_over_all_valid_images_on_the_host_and_under_jit(x64):
    some = found(2)
    kept, task = kept_of(some, 16), detection(ANCHORS)
    assert task.score.name == "mAP50"
    assert not task.classifies
    expected = mean_average_precision(some)
    np.testing.assert_allclose(task.score.of_all(kept), expected, rtol=1e-12)
    kept = jax.tree.map(jnp.asarray, kept)
    np.testing.assert_allclose(jax.jit(task.score.of_all)(kept), expected, rtol=1e-12)
    whole = detection(ANCHORS, score="mAP50-95").score.of_all(kept)
    np.testing.assert_allclose(whole, mean_average_precision(some, THRESHOLDS), rtol=1e-12)


TRUE = ((0.1, 0.1, 0.3, 0.3), (0.5, 0.5, 0.9, 0.9), (0.6, 0.1, 0.8, 0.3), (0, 0, 0, 0))


def picture(*found) -> BoxPicture:
    """Rows (class, x1, y1, x2, y2), best first."""
    table = np.array(found, float).reshape(-1, 5)
    scores = np.linspace(0.9, 0.5, len(table))
    image = np.full((40, 40, 3), 128, np.uint8)
    classes = table[:, 0].astype(int)
    return BoxPicture(
        image, table[:, 1:], scores, classes, np.array(TRUE), np.array([0, 1, -3, -1])
    )


def test_a_box_is_found_once_by_the_best_of_its_class_and_crowds_are_not_missed():
    right, missed = judge_boxes(
        picture(
            (0, 0.1, 0.1, 0.3, 0.32),  # right
            (0, 0.1, 0.1, 0.3, 0.3),  # the same once more
            (0, 0.5, 0.5, 0.9, 0.9),  # another class
            (1, 0.5, 0.5, 0.69, 0.9),  # IoU below a half
            (-1, 0, 0, 0, 0),
        )
    )
    assert right.tolist() == [True, False, False, False, False]
    assert missed.tolist() == [False, True, False, False]
    right, missed = judge_boxes(picture())
    assert missed.tolist() == [True, True, False, False]


def test_right_wrong_and_missed_boxes_are_drawn_in_their_colours():
    rows = {"a": [picture((0, 0.1, 0.1, 0.3, 0.3)), picture((1, 0.1, 0.1, 0.2, 0.2))]}
    pixels = np.asarray(Image.open(io.BytesIO(found_boxes(rows, ("cat", "d$g")))).convert("RGB"))
    for colour in ((0, 255, 0), (255, 0, 0), (255, 165, 0)):
        assert (pixels == colour).all(-1).sum() > 20
    none = {"a": [picture((0, 0.1, 0.1, 0.3, 0.3), (1, 0.5, 0.5, 0.9, 0.9))]}
    assert found_boxes(none, ("cat", "dog")) != found_boxes(rows, ("cat", "dog"))


SIDE = 32


def split(count: int, seed: int) -> Split:
    """Grey images with a bright square for every box."""
    labels = boxed.boxes(np.random.default_rng(seed), count, 2)
    images = np.full((count, SIDE, SIDE, 3), 60, np.uint8)
    for image, boxes in zip(images, labels["boxes"], strict=True):
        for x1, y1, x2, y2 in np.round(boxes * SIDE).astype(int):
            image[y1:y2, x1:x2] = 220
    return Split(images, labels)


def dataset() -> Dataset:
    domains = [
        Domain(name, split(6, k), split(3, k + 9), split(4, k + 19)) for k, name in enumerate("abc")
    ]
    return Dataset("squares", 3, tuple(domains), (0.0,), (1.0,), boxed.CLASSES)


@pytest.mark.slow
def test_a_detectors_run_reports_map_and_shows_its_boxes_and_can_be_tested_again(
    monkeypatch, tmp_path
):
    monkeypatch.setitem(experiment.DATASETS, "squares", lambda config: dataset())
    # Compiled in a third of the time of TinyDetector.
    keys = {"model": "detectors:Detector", "rounds": 1, "eval_every": 1, "target": "c"}
    keys |= {"eval_batch_size": 8, "adapt_batch_size": 8, "data__image_size": SIDE}
    summary = runs.run(tmp_path, **keys, data__name="squares", data__augment="boxes")
    assert summary["score"] == "mAP50"
    assert set(summary["accuracy"]["internal"]) == {"a", "b", "mean"}
    assert all(0 <= x <= 100 for x in summary["accuracy"]["internal"].values())
    assert tables.comparison([[summary]]).startswith("mAP50 %")
    assert (tmp_path / "plots/boxes.png").stat().st_size > 10_000
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "Boxes found in test images" in page
    assert "accuracy by client" not in page
    result, _ = evaluate_finished.run(tmp_path, Request(changes=(), trust=True))
    assert result["score"] == "mAP50"
    assert result["unseen"] == summary["accuracy"]["unseen"]


def test_a_model_that_does_not_suit_the_labels_is_refused():
    def task(model, data, **changes):
        config, network = runs.config(model=model, **changes), MODELS[model](num_classes=3)
        return choose_task(config, network, data, jnp.zeros((1, 28, 28, 3)))

    with pytest.raises(ConfigError, match="TinyDetector"):
        task("DigitCNN", dataset())
    with pytest.raises(ConfigError, match="have one class each: choose a classifier"):
        task("TinyDetector", runs.DATA)
    with pytest.raises(ConfigError, match=r"config\.task=segmentation .* choose detection"):
        task("TinyDetector", dataset(), task="segmentation")
    assert task("DigitCNN", runs.DATA).classifies
    assert task("TinyDetector", dataset()).score.name == "mAP50"
