"""Networks with group norm or none: beside PyTorch, and FedWon's clipping by NumPy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn import models
from fedjax_bn.contrib import fedwon
from fedjax_bn.methods import fedavg
from fedjax_bn.models.layers import Network

KEY = jax.random.key(0)
NETS = {
    "DenseNet121": (32, {"growth": 4, "width": 8, "block_sizes": (1, 2)}),
    "DigitCNN": (8, {"width": 8, "hidden": (8, 8)}),
    "ResNet18": (32, {"width": 4, "stage_sizes": (1, 2)}),
    "SmallCNN": (8, {}),
    "TinyDetector": (32, {"width": 4}),
    "UNet": (16, {"width": 4, "levels": 2}),
    "YOLOv5n": (64, {"width": 0.05}),
}
NUMBERS = {"TinyDetector": 8, "YOLOv5n": 8}  # of a box: where it is, whether there is one, classes


LONG = ("DenseNet121", "YOLOv5n")  # to trace


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in NETS]
)
def test_every_network_has_forms_without_running_statistics(name):
    side, fields = NETS[name]
    images = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
    plain = jax.eval_shape(getattr(models, name)(num_classes=3, **fields).init, KEY, images)
    for norm, missing in {"group": 0, "none": size(plain["batch_stats"])}.items():
        net = getattr(models, name)(num_classes=3, norm=norm, **fields)
        outputs, variables = jax.eval_shape(net.init_with_output, KEY, images)
        assert set(variables) == {"params"}
        sizes = {(leaf.shape[0], leaf.shape[-1]) for leaf in jax.tree.leaves(outputs)}
        assert sizes == {(2, NUMBERS.get(name, 3))}
        assert size(plain["params"]) - size(variables["params"]) == missing


class Grouped(Network):
    """A group norm alone."""

    norm: str = "group"

    @nn.compact
    def __call__(self, x):
        return self.normalize(x, "norm")


@pytest.mark.parametrize("channels", [6, 64])
def test_group_norm_is_pytorchs(x64, channels):
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(channels)
    x, scale, bias = (random.normal(size=s) for s in ((2, 3, 5, channels), channels, channels))
    variables = {"params": {"norm": {"group": {"scale": scale, "bias": bias}}}}
    ours = jax.jit(Grouped(param_dtype=float).apply)(variables, jnp.asarray(x))
    groups = {6: 1, 64: 16}[channels]
    theirs = torch.nn.functional.group_norm(
        torch.tensor(x).permute(0, 3, 1, 2), groups, *map(torch.tensor, (scale, bias))
    )
    np.testing.assert_allclose(ours, theirs.permute(0, 2, 3, 1), rtol=1e-9, atol=1e-10)


class Convolution(Network):
    """A convolution whose kernel is standardized."""

    norm: str = "none"

    @nn.compact
    def __call__(self, x):
        return self.convolve(x, 4, 3, padding=1, name="conv")


def test_a_convolution_without_norm_is_pytorchs_by_the_standardized_kernel(x64):
    torch = pytest.importorskip("torch")
    x, kernel = (np.random.default_rng(1).normal(size=s) for s in ((2, 6, 5, 3), (3, 3, 3, 4)))
    variables = {"params": {"conv": {"kernel": jnp.asarray(kernel)}}}
    ours = jax.jit(Convolution(param_dtype=float).apply)(variables, jnp.asarray(x))
    weights = torch.tensor(kernel).permute(3, 2, 0, 1)
    var, mean = torch.var_mean(weights, dim=(1, 2, 3), keepdim=True, correction=0)
    gain = np.sqrt(2 / (1 - 1 / np.pi))
    weights = gain * (weights - mean) / torch.sqrt(var * 27)
    theirs = torch.nn.functional.conv2d(torch.tensor(x).permute(0, 3, 1, 2), weights, padding=1)
    np.testing.assert_allclose(ours, theirs.permute(0, 2, 3, 1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("clip", [0.01, 100.0])
def test_fedwons_step_is_clipped_unit_by_unit(x64, clip):
    """A unit is an output's column of the kernel, and the whole bias."""
    variables = fed.in_float64(fed.variables_of(fed.PlainNet()))
    batches = fed.batches_of((4,))
    state, _ = fed.run_rounds(fedwon(fed.PlainNet(), optax.sgd(0.5), clip=clip), variables, batches)
    w = variables["params"]["dense"]
    x, y = (np.asarray(batches[name][0, 0]) for name in ("image", "label"))
    z = x @ w["kernel"] + w["bias"]
    residual = (np.exp(z) / np.exp(z).sum(1, keepdims=True) - np.eye(fed.CLASSES)[y]) / 4
    gradient = {"kernel": x.T @ residual, "bias": residual.sum(0)}
    expected = {}
    for name, g in gradient.items():
        size = lambda v: np.sqrt(np.square(v).sum(0, keepdims=True))  # noqa: E731
        factor = np.minimum(1, clip * np.maximum(size(w[name]), 1e-3) / size(g))
        expected[name] = w[name] - 0.5 * factor * g
    fed.assert_close(fed.global_variables(state)["params"]["dense"], expected, rtol=1e-9)


def test_fedwon_refuses_a_batch_norm_and_without_clipping_is_fedavg():
    net = models.MLP(fed.CLASSES, hidden=(8,))
    with pytest.raises(ValueError, match="fedwon"):
        fedwon(net, optax.sgd(0.1)).init(KEY, fed.variables_of(net), 2)
    plain = models.MLP(fed.CLASSES, hidden=(8,), norm="none")
    both = fedwon(plain, fed.SGD), fedavg(plain, fed.SGD)
    given = fed.begun(both[0], KEY, fed.variables_of(plain), 2), fed.batches_of((5, 4)), KEY
    assert len({method.round.lower(*given).as_text() for method in both}) == 1
