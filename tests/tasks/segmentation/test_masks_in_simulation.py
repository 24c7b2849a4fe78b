"""Masks on the short path: arrays to Dice, by simulation, by batches, and by a predictor."""

import numpy as np
import optax
import pytest

import square_masks
from fedjax_bn.methods import fedbn
from fedjax_bn.models import MLP, UNet
from fedjax_bn.simulation import simulate
from fedjax_bn.task import segmentation

TASK = segmentation(3)
METHOD = fedbn(UNet(num_classes=3, width=2, levels=1), optax.sgd(0.1), task=TASK)
OPTIONS = {"rounds": 2, "batch_size": 4, "eval_every": 1, "show_progress": False}


def of_volumes(count: int, seed: int) -> tuple:
    """Two slices a volume."""
    images, masks = square_masks.samples(count, seed)
    volume = np.arange(count) // 2
    return images, {"mask": masks, "volume": volume, "spacing": np.ones((count, 3))}


@pytest.fixture(scope="module")
def result():
    clients = {"a": of_volumes(20, 0), "b": of_volumes(8, 1)}
    unseen = {"z": of_volumes(5, 2)}
    how = {"adaptations": ("running",)}
    return simulate(METHOD, clients=clients, unseen=unseen, **how, **OPTIONS)


@pytest.mark.slow
def test_the_score_is_the_mean_dice_of_volumes(result):
    images, labels = of_volumes(5, 2)
    found = result.predict(images)
    assert found.shape == (5, 16, 16, 3)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    dice = result.accuracy["unseen"]["z"]["running"]
    assert dice == pytest.approx(TASK.score(found, labels), rel=1e-5)
    predicted, by_volume = found.argmax(-1), []
    for volume in range(3):
        own = labels["volume"] == volume
        for number in (1, 2):
            p, t = predicted[own] == number, labels["mask"][own] == number
            by_volume.append(2 * (p & t).sum() / (p.sum() + t.sum()))
    assert dice == pytest.approx(100 * np.mean(by_volume), rel=1e-5)
    assert str(result).startswith("Dice %")


def test_slices_of_one_volume_are_never_divided():
    """Of one volume there is nothing to validate on, whatever the number of its slices."""
    images, masks = square_masks.samples(40, 3)
    labels = {"mask": masks, "volume": np.zeros(40, int)}
    with pytest.raises(ValueError, match="validation"):
        simulate(METHOD, clients={"a": (images, labels)}, **OPTIONS)


IMAGES, MASKS = square_masks.samples(4, 0)


@pytest.mark.parametrize(
    ("method", "labels", "said"),
    [
        (METHOD, MASKS[:, :8], r"client 'a' .*\[4, 8, 16\]"),
        (METHOD, MASKS + 1, "class 3 in mask 0"),
        (METHOD, MASKS.astype(int) - 1, "client 'a' .* label -1"),
        (METHOD, {"masks": MASKS}, r"\['masks'\]"),
        (METHOD, np.zeros(4, int), "no masks"),
        (fedbn(MLP(num_classes=3), optax.sgd(0.1)), MASKS, "masks"),
    ],
)
def test_masks_that_do_not_suit_are_refused(method, labels, said):
    with pytest.raises(ValueError, match=said):
        simulate(method, clients={"a": (IMAGES, labels)}, **OPTIONS)
