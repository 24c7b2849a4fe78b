"""Boxes go with their images wherever samples go."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import boxed
from fedjax_bn.data.division.clients import make_clients, pool_clients
from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset, splits, whole
from fedjax_bn.data.labels import BOXES, CLASS, class_counts, join, strata, take
from fedjax_bn.data.sampling import (
    by_epochs,
    label_forms,
    point_to,
    stack_clients,
    validation_batches,
)
from fedjax_bn.engine.batches import blank_padding, check_batches
from fedjax_bn.training.evaluation.scoring import SplitBatches
from fedjax_bn.training.rounds import stream_rounds


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
