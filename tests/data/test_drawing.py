"""Batches from a user's own arrays, in one call."""

import jax
import numpy as np
import pytest

from fedjax_bn.data.sampling import drawing


def arrays(sizes=(7, 3), seed=0):
    random = np.random.default_rng(seed)
    return [
        (random.normal(size=(n, 6)).astype(np.float32), random.integers(0, 3, n)) for n in sizes
    ]


def test_every_epoch_holds_each_sample_once_with_its_label():
    clients = arrays()
    draw = drawing(clients, batch_size=4, local_epochs=2)
    first, second = (draw(jax.random.key(seed)) for seed in range(2))
    assert first["label"].shape == (2, 4, 4)
    for k, (images, labels) in enumerate(clients):
        for epoch in (slice(0, 2), slice(2, 4)):
            valid = np.asarray(first["valid"][k, epoch])
            index = np.asarray(first["image"][k, epoch])[valid]
            assert sorted(index) == list(range(len(images)))
            np.testing.assert_array_equal(first["source"][k][index], images[index])
            np.testing.assert_array_equal(first["label"][k, epoch][valid], labels[index])
    assert (first["image"] != second["image"]).any()
    assert first["size"].tolist() == [7, 3]


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ([], "no domains"),
        ([(np.zeros((2, 6), np.float32), np.zeros(3, int))], "client 0"),
        ([(np.zeros((2, 6), np.float32), np.array([0.5, 1]))], "the labels of client 0"),
        ([*arrays((2,)), (np.zeros((2, 5), np.float32), np.zeros(2, int))], r"\[5\]"),
        ([(np.zeros((2, 6), int), np.zeros(2, int))], "the images of client 0 have dtype int64"),
    ],
)
def test_arrays_that_do_not_suit_are_refused(clients, said):
    with pytest.raises(ValueError, match=said):
        drawing(clients)
