"""The detectors: counts, shapes, the same outputs as PyTorch's, and a user's own weights."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from test_models import arrays

from fedjax_bn import models
from fedjax_bn.models import pretrained
from fedjax_bn.models.feature_masks import with_masks
from fedjax_bn.models.forward import forward
from fedjax_bn.models.layers import silu
from fedjax_bn.models.torch_weights import from_torch, to_torch
from fedjax_bn.models.yolo import ANCHORS
from fedjax_bn.tasks.detection import Anchors


@cache
def abstract(model, size=64):
    images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images)


def drawn(model):
    """Variables with every leaf random, variances positive."""
    rng = np.random.default_rng(0)
    draw = lambda x: (0.2 + rng.random(x.shape) / 9).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, abstract(model))


def small(classes=3, **fields):
    return models.YOLOv5(classes, width=0.1, depth=0.33, **fields)


def test_maps_have_strides_8_16_and_32_at_any_size_that_the_coarsest_divides():
    images = jax.ShapeDtypeStruct((2, 32, 96, 3), jnp.float32)
    for model, strides in ((small(), (8, 16, 32)), (models.TinyDetector(3), (8, 16))):
        outputs = jax.eval_shape(model.apply, abstract(model), images)
        assert [out.shape for out in outputs] == [(2, 32 // s, 96 // s, 3, 8) for s in strides]
        with pytest.raises(ValueError, match=f"{strides[-1]} divides"):
            abstract(model, 40)


def test_predictions_start_from_the_prior():
    """8 objects in 640 x 640 pixels, each class with 0.6 / C, but for PyTorch's small draws."""

    @jax.jit
    def drawn():  # one leaf alone, which compiles sooner
        model, images = models.TinyDetector(num_classes=6, width=13), jnp.zeros((1, 16, 16, 3))
        return model.init(jax.random.key(0), images)["params"]["predict1"]["bias"]

    bias = np.asarray(drawn()).reshape(3, 11)
    for column, start in ((4, np.log(8 / 1600)), (5, np.log(0.6 / 5.00001)), (0, 0.0)):
        assert np.abs(bias[:, column] - start).max() <= 0.1
    assert np.ptp(bias[:, 0]) > 0


def test_masks_of_a_detector_are_those_of_its_taps_and_multiply_what_predictions_read():
    model = models.TinyDetector(num_classes=2, width=1)
    variables = drawn(model)
    masked = with_masks(model, variables)
    assert {name: mask.size for name, mask in masked["mask"].items()} == {"tap0": 4, "tap1": 8}
    assert with_masks(small(), abstract(small()), ("tap2",))["mask"]["tap2"].size == 104
    images = np.random.default_rng(1).random((1, 32, 32, 3), np.float32)
    masked["mask"]["tap1"] = masked["mask"]["tap1"].at[3].set(0)
    kernel = np.array(variables["params"]["predict1"]["kernel"])
    kernel[:, :, 3] = 0
    variables["params"]["predict1"]["kernel"] = kernel
    both = jax.jit(lambda *given: [forward(model, v, images).outputs for v in given])
    compare = partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(compare, *both(masked, variables))


def test_outputs_are_those_of_pytorch_in_float64(x64):
    torch = pytest.importorskip("torch")
    import torch_yolo

    torch.manual_seed(0)
    theirs = torch_yolo.YOLOv5(3, w=1, again=(1, 2, 3, 1, 1)).double().eval()
    for norm in (m for m in theirs.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    state_dict = arrays(theirs)
    model = models.YOLOv5(3, width=0.125)
    variables = from_torch(model, state_dict, (64, 96, 3))
    images = np.random.default_rng(0).random((1, 64, 96, 3))
    ours = jax.jit(model.apply)(variables, images)
    with torch.no_grad():
        expected = theirs(torch.tensor(images).permute(0, 3, 1, 2))
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-9, atol=1e-11)


def test_silu_and_its_derivatives_are_the_formulas(x64):
    x = np.linspace(-9, 9, 19)
    s = 1 / (1 + np.exp(-x))
    slope = s * (1 - s)
    first, second = s + x * slope, slope * (2 + x * (1 - 2 * s))
    each = lambda function: jax.jit(jax.vmap(function))(x)  # noqa: E731
    np.testing.assert_allclose(each(silu), x * s, atol=1e-14)
    for derivative in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(each(derivative(silu)), first, atol=1e-14)
        np.testing.assert_allclose(each(derivative(jax.grad(silu))), second, atol=1e-14)


def test_a_state_dict_of_349_entries_goes_to_our_variables_and_back():
    model = small()
    variables = drawn(model)
    state_dict = to_torch(model, variables)
    assert len(state_dict) == 349
    assert state_dict["model.6.m.2.cv2.conv.weight"].shape == (28, 28, 3, 3)
    assert state_dict["model.9.cv2.bn.running_var"].shape == (104,)
    assert state_dict["model.24.m.1.bias"].shape == (24,)
    np.testing.assert_array_equal(state_dict["model.24.anchors"][2, 0], [116 / 32, 90 / 32])
    again = from_torch(model, state_dict, (64, 64, 3))
    jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_a_file_of_other_classes_fills_all_but_the_predictions(write):
    state_dict = to_torch(small(), drawn(small()))
    variables, notes = pretrained.load_pretrained(write(state_dict), small(2), abstract(small(2)))
    assert any("the file's has 3 classes and this model 2" in note for note in notes)
    leaves = flatten_dict(variables)
    fresh = {path[1] for path, leaf in leaves.items() if isinstance(leaf, jax.ShapeDtypeStruct)}
    assert fresh == {"predict0", "predict1", "predict2"}
    kernel = variables["params"]["layer4"]["bottleneck1"]["cv2"]["conv"]["kernel"]
    expected = state_dict["model.4.m.1.cv2.conv.weight"].transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(kernel, expected)


def test_a_file_with_other_anchors_or_none_is_refused_with_them(write):
    state_dict = to_torch(small(), drawn(small()))
    sizes = (((1, 2), (3, 4), (5, 6)), *ANCHORS.sizes[1:])
    other = small(anchors=Anchors(sizes, ANCHORS.strides))
    with pytest.raises(ValueError, match=re.escape("[[[1.25, 1.625],")):
        pretrained.load_pretrained(write(state_dict), other, abstract(small()))
    del state_dict["model.24.anchors"]
    with pytest.raises(ValueError, match=r"lacks.*model\.24\.anchors"):
        pretrained.load_pretrained(write(state_dict), small(), abstract(small()))
