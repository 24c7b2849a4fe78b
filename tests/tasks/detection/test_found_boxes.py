"""Pictures of found boxes say rightly which are right, wrong and missed."""

import io

import numpy as np
from PIL import Image

from fedjax_bn.tasks.detection.found_boxes import BoxPicture, found_boxes, judge_boxes

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
