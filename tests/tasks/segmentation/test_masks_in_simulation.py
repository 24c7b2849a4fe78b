"""Masks on the short path: which arrays a simulation refuses."""

import numpy as np
import optax
import pytest

import square_masks
from fedjax_bn.methods import fedbn
from fedjax_bn.models import MLP, UNet
from fedjax_bn.simulation import simulate
from fedjax_bn.task import segmentation

METHOD = fedbn(UNet(num_classes=3, width=2, levels=1), optax.sgd(0.1), task=segmentation(3))
OPTIONS = {"rounds": 2, "batch_size": 4, "eval_every": 1, "show_progress": False}


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
