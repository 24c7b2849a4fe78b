"""The loss of detection against PyTorch in float64, and what must not change it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from detectors import ANCHORS, labels, outputs
from fedjax_bn.tasks.detection import Recipe, detection_loss

torch = pytest.importorskip("torch")
ALL = np.ones(4, bool)


def loss(outs, label, valid, recipe=None):
    return detection_loss(outs, label, valid, ANCHORS, recipe)


judge = jax.jit(jax.value_and_grad(loss), static_argnames="recipe")  # compiled once in float64


def by_torch(outs, label, images, **options):
    """The loss of some of the images, which looks at matches alone, and its gradient."""
    import torch_yolo

    given = [torch.tensor(np.float64(out[images]), requires_grad=True) for out in outs]
    boxes, classes = (torch.tensor(label[name][images]) for name in ("boxes", "class"))
    value = torch_yolo.detection_loss(given, boxes, classes.long(), ANCHORS, **options)
    value.backward()
    return value.item(), [out.grad.numpy() for out in given]


@pytest.mark.parametrize(
    ("drawn", "scaled"),
    [({}, True), ({"seed": 1}, True), ({}, False), ({"classes": 1}, True)],
    ids=["seed 0", "seed 1", "plain gains", "a single class, which has no loss of classes"],
)
def test_the_loss_and_its_gradient_are_those_of_pytorch(x64, drawn, scaled):
    label, outs = labels(**drawn), outputs(**drawn)
    assert (label["class"] >= 0).sum() > 10  # boxes that are learned
    value, gradient = judge(outs, label, ALL, recipe=None if scaled else Recipe(scaled=False))
    expected, slopes = by_torch(outs, label, ALL, scaled=scaled)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for ours, theirs in zip(gradient, slopes, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-13)


def test_the_order_of_boxes_and_what_lies_in_padding_change_nothing(x64):
    label, outs = labels(), outputs()
    value, gradient = judge(outs, label, ALL)
    order = np.random.default_rng(0).permutation(6)
    shuffled = {name: leaf[:, order] for name, leaf in label.items()}
    padding = label["class"] < 0
    odd = {
        "boxes": np.where(padding[..., None], [0.3, 0.2, 0.9, 0.1], label["boxes"]),
        "class": np.where(padding, -2 - 1, label["class"]).astype(np.int32),  # crowds of class 1
    }
    for other in (shuffled, odd):
        same, slopes = judge(outs, other, ALL)
        np.testing.assert_allclose(same, value, rtol=1e-14)
        for ours, theirs in zip(slopes, gradient, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-15)


def test_images_that_are_not_valid_change_nothing(x64):
    """A blank image has the labels of class 0 that padding of a batch leaves."""
    label, outs, valid = labels(), outputs(), np.array([1, 1, 0, 1], bool)
    blank = {
        name: np.where(valid.reshape(4, *[1] * (x.ndim - 1)), x, 0) for name, x in label.items()
    }
    blank["class"] = blank["class"].astype(np.int32)
    value, gradient = judge(outs, blank, valid)
    np.testing.assert_allclose(value, by_torch(outs, label, valid)[0], rtol=1e-12)
    moved = [np.where(valid[:, None, None, None, None], out, 3 * out) for out in outs]
    np.testing.assert_allclose(judge(tuple(moved), blank, valid)[0], value, rtol=1e-14)
    assert not any(np.asarray(slope[2]).any() for slope in gradient)
    assert judge(outs, blank, np.zeros(4, bool))[0] == 0


def test_boxes_without_area_teach_objectness_alone(x64):
    outs, label = outputs(), labels()
    flat = {"boxes": label["boxes"][..., [0, 1, 0, 3]], "class": label["class"]}
    none = {"boxes": flat["boxes"], "class": np.full_like(label["class"], -1)}
    for ours, theirs in zip(judge(outs, flat, ALL)[1], judge(outs, none, ALL)[1], strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_array_equal(ours, theirs)


def test_under_vmap_and_shard_map_and_in_float32_it_is_the_same():
    label, outs = labels(), outputs()
    single = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == float else x, (outs, label))
    pairs = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), single)
    each = jax.vmap(lambda *given: loss(*given, jnp.ones(2, bool)))
    mesh, rows = Mesh(np.array(jax.devices()[:2]), ("clients",)), PartitionSpec("clients")
    ours = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=rows, out_specs=rows))(*pairs)
    theirs = [by_torch(outs, label, at)[0] for at in (slice(0, 2), slice(2, 4))]
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)


def test_outputs_of_16_bits_have_the_loss_of_their_values(x64):
    label, outs = labels(), [jnp.asarray(raw, jnp.float16) for raw in outputs()]
    value, _ = judge(outs, label, ALL)
    expected, _ = by_torch(outs, label, ALL)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
