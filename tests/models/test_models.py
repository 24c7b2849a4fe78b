"""The networks against PyTorch's own definitions, and the counts of the published ones."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from fedjax_bn import models
from fedjax_bn.models.torch_weights import from_torch

# name -> (our network, PyTorch's given its module, shape of a batch without its size)
SMALL = {
    "digit_cnn": (
        models.DigitCNN(hidden=(32, 16), width=16),
        lambda t: t.DigitCNN(hidden=(32, 16), width=16),
        (28, 28, 3),
    ),
    "alexnet": (models.AlexNet(hidden=(32, 16)), lambda t: t.AlexNet(hidden=(32, 16)), (67, 71, 3)),
    "resnet_basic": (
        models.ResNet18(7, stage_sizes=(1, 2), width=8),
        lambda t: t.ResNet(t.BasicBlock, (1, 2), 8, 7),
        (33, 40, 3),
    ),
    "resnet_bottleneck": (
        models.ResNet50(stage_sizes=(2, 1), width=4),
        lambda t: t.ResNet(t.Bottleneck, (2, 1), 4),
        (32, 32, 3),
    ),
    "densenet": (
        models.DenseNet121(block_sizes=(1, 2), growth=4, width=8),
        lambda t: t.DenseNet((1, 2), 4, 8),
        (38, 32, 3),
    ),
    "mlp": (models.MLP(), lambda t: t.MLP(23), (23,)),
}
IMAGES = {models.MLP: (5995,), models.DigitCNN: (28, 28, 3)}
LONG = ("alexnet", "densenet")


def torch_and_jax(make, model, shape, batch=3):
    """PyTorch's network and images, our variables and images: the same numbers in float64."""
    torch = pytest.importorskip("torch")
    import torch_models

    torch.manual_seed(0)
    network = make(torch_models).double()
    for module in network.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias)
            torch.nn.init.normal_(module.running_mean)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    images = torch.randn(batch, *shape, dtype=torch.float64)
    variables = from_torch(model, arrays(network), shape)
    theirs = images.movedim(-1, 1) if len(shape) == 3 else images
    return network, theirs, variables, jnp.asarray(images.numpy())


def arrays(network):
    return {name: tensor.detach().numpy().copy() for name, tensor in network.state_dict().items()}


def assert_near(actual, expected, tolerance=1e-10):
    expected = np.asarray(expected)
    assert actual.dtype == expected.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def assert_gradients(gradients, expected):
    """Some are 0 but for rounding (a bias before batch norm): compared by the largest."""
    atol = 1e-10 * max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected))
    compare = partial(np.testing.assert_allclose, rtol=0, atol=atol)
    jax.tree.map(compare, gradients, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(float)}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in SMALL],
)
def test_networks_equal_pytorch_in_both_modes_moved_statistics_and_gradients(name):
    model, make, shape = SMALL[name]
    differentiated = name in ("resnet_basic", "densenet")
    network, theirs, variables, images = torch_and_jax(make, model, shape)

    def loss(params):
        trained = variables | {"params": params}
        logits, moved = model.apply(trained, images, mutable=["batch_stats"])
        return -nn.log_softmax(logits)[:, 1].mean(), (logits, moved["batch_stats"])

    @jax.jit
    def both(params):
        features = model.apply(variables, images, method="features")
        step = jax.value_and_grad(loss, has_aux=True) if differentiated else loss
        return features, step(params)

    features, step = both(variables["params"])
    expected = [output.detach() for output in network.eval()(theirs)]
    assert_near(features, expected[0])
    assert_near(model.apply(variables, features, method="classify"), expected[1])
    logits = network.train()(theirs)[1]
    (value, (ours, moved)), gradients = step if differentiated else (step, None)
    assert_near(ours, logits.detach())
    jax.tree.map(assert_near, moved, from_torch(model, arrays(network), shape)["batch_stats"])
    if gradients is None:
        return
    expected = -logits.log_softmax(-1)[:, 1].mean()
    expected.backward()
    assert_near(value, expected.detach())
    theirs = {name: tensor.grad.numpy() for name, tensor in network.named_parameters()}
    assert_gradients(gradients, from_torch(model, arrays(network) | theirs, shape)["params"])


@pytest.mark.parametrize(
    ("model", "batch_norms", "parameters"),
    [
        (models.DigitCNN(), 5, 14_219_210),
        (models.SmallCNN(), 3, 24_346),
        (models.AlexNet(), 7, 57_063_498),
        (models.ResNet18(1000), 20, 11_689_512),
        (models.ResNet50(1000), 53, 25_557_032),
        (models.DenseNet121(1000), 121, 7_978_856),
        (models.MLP(), 2, 96_306),
        (models.YOLOv5n(), 57, 1_872_157),
        (models.YOLOv5s(), 57, 7_235_389),
        (models.TinyDetector(), 9, 382_570),
    ],
)
def test_counts_of_batch_norms_and_parameters_are_the_published_ones(
    model, batch_norms, parameters
):
    shape = IMAGES.get(type(model), (224, 224, 3))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *shape)))
    means = {path[:-1] for path in flatten_dict(shapes["batch_stats"]) if path[-1] == "mean"}
    scales = {path[:-1] for path in flatten_dict(shapes["params"]) if path[-1] == "scale"}
    assert means == scales
    assert len(means) == batch_norms
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes["params"])) == parameters


SMALLEST = models.DenseNet121(block_sizes=(1, 1, 1, 1))


@pytest.mark.parametrize(
    ("model", "side"), [(models.AlexNet(), 62), (models.DigitCNN(), 3), (SMALLEST, 16)]
)
def test_images_that_are_too_small_are_refused(model, side):
    with pytest.raises(ValueError, match="pixels"):
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, side, side, 3)))


# network, image, {layer: (fan, whether uniform by fan-in with a bias, else He normal)}
INITIAL = [
    (models.DigitCNN(600, (64, 32)), (4, 4, 3), {("conv2",): (1600, True), ("head",): (32, True)}),
    (
        models.ResNet18(100, stage_sizes=(1,)),
        (8, 8, 3),
        {("conv1",): (49 * 64, False), ("head",): (64, True)},
    ),
]


@pytest.mark.parametrize(("model", "shape", "layers"), INITIAL)
def test_initial_weights_have_the_references_distribution(model, shape, layers):
    @jax.jit
    def drawn():  # these layers alone, which compiles sooner
        key = jax.random.key(0, impl="rbg")  # likewise
        params = flatten_dict(model.init(key, jnp.zeros((1, *shape)))["params"])
        return {path: leaf for path, leaf in params.items() if path[:-1] in layers}

    params = jax.tree.map(np.asarray, drawn())
    for layer, (fan, uniform) in layers.items():
        deviation = (1 / (3 * fan) if uniform else 2 / fan) ** 0.5
        np.testing.assert_allclose(params[*layer, "kernel"].std(), deviation, rtol=0.05)
        if uniform:
            leaves = np.abs(np.concatenate([params[*layer, n].ravel() for n in ("kernel", "bias")]))
            assert 0.9 * fan**-0.5 < leaves.max() <= fan**-0.5
            assert params[*layer, "bias"].min() < 0 < params[*layer, "bias"].max()


def test_variables_are_made_in_param_dtype():
    model = models.ResNet18(stage_sizes=(1, 1), width=4, param_dtype=jnp.bfloat16)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3), jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.bfloat16)}
