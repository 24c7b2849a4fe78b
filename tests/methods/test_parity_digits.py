"""Three rounds on real digits, then TsmoBN, against independent PyTorch runs.

All of it is in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_bn import adaptation
from fedjax_bn.aggregation import uniform
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.methods import fedavg, fedbn, fedprox, silobn
from fedjax_bn.models import DigitCNN
from fedjax_bn.models.torch_weights import from_torch

pytestmark = pytest.mark.usefixtures("spacious")
METHODS = {"fedavg": fedavg, "fedprox": fedprox, "fedbn": fedbn, "silobn": silobn}
DOMAINS = ("mnist", "svhn", "usps", "fonts", "mnist_m")
SAMPLES, BATCH, STEPS = 103, 32, 4
SHAPES = {
    "conv1": (64, 3, 5, 5),
    "conv2": (64, 64, 5, 5),
    "conv3": (128, 64, 5, 5),
    "fc1": (2048, 6272),
    "fc2": (512, 2048),
    "fc3": (10, 512),
}
NORM_LEAVES = [("batch_stats", "mean"), ("batch_stats", "var"), ("params", "scale")]
NORM_LEAVES += [("params", "bias")]


@pytest.fixture(scope="module")
def stored(shared):
    """The reference values and the clients' images and labels."""
    files = (shared / "oracle" / "digits.npz", shared / "data" / "digits.npz")
    return tuple(dict(np.load(file)) for file in files)


def initial_variables():
    """The common start of the reference runs."""
    random = np.random.RandomState(0)
    weights = {}
    for i, (name, shape) in enumerate(SHAPES.items(), start=1):
        scale = np.sqrt(2 / np.prod(shape[1:]))
        weight = (random.standard_normal(shape) * scale).astype(np.float32)
        weights[f"{name}.weight"] = weight.astype(np.float64)
        weights[f"{name}.bias"] = np.zeros(shape[0])
        if name != "fc3":
            weights[f"bn{i}.weight"], weights[f"bn{i}.bias"] = np.ones(shape[0]), np.zeros(shape[0])
            weights[f"bn{i}.running_mean"] = np.zeros(shape[0])
            weights[f"bn{i}.running_var"] = np.ones(shape[0])
    return from_torch(DigitCNN(), weights)


def pixels(images):
    return (images / 255 - 0.5) / 0.5


def batches_of(data):
    """The first 103 training images of each domain in order; the fourth batch has 7 of them."""
    image = np.zeros((5, STEPS * BATCH, 28, 28, 3), np.uint8)
    label = np.zeros((5, STEPS * BATCH), np.int32)
    for k, domain in enumerate(DOMAINS):
        image[k, :SAMPLES] = data[f"{domain}__train_images"][:SAMPLES]
        label[k, :SAMPLES] = data[f"{domain}__train_labels"][:SAMPLES]
    valid = np.broadcast_to(np.arange(STEPS * BATCH) < SAMPLES, label.shape)
    shape = (5, STEPS, BATCH)
    return {
        "image": jnp.asarray(image.reshape(*shape, 28, 28, 3)),
        "label": jnp.asarray(label.reshape(shape)),
        "valid": jnp.asarray(valid.reshape(shape)),
    }


@functools.cache
def trained(name, folder):
    """Metrics and logits of the rounds, the last norms of all clients, what the server has.

    The clients' models are not kept: all of them together are half a gigabyte.
    """
    data, model = dict(np.load(folder / "data" / "digits.npz")), DigitCNN()
    method = METHODS[name](model, optax.sgd(0.01), weigh=uniform)
    batches, key = batches_of(data), jax.random.key(0)
    tests = [pixels(data[f"{d}__test_images"][:16].astype(np.float64)) for d in DOMAINS]
    state, predict, seen = method.init(key, initial_variables(), 5), jax.jit(model.apply), []
    for _ in range(3):
        state, metrics = method.round(state, batches, key)
        logits, norms = of_clients(predict, client_variables(state), tests)
        seen.append((jax.device_get(metrics), logits))
    return seen, norms, global_variables(state)


def of_clients(predict, clients, tests):
    """The logits of each on its own images, and two of their batch norms."""
    own = [jax.tree.map(lambda leaf, k=k: np.asarray(leaf)[k], clients) for k in range(len(tests))]
    logits = [np.asarray(predict(*pair)) for pair in zip(own, tests, strict=True)]
    return logits, {
        (i, leaf): np.array(clients[collection][f"norm{i}"][leaf])
        for i in (1, 5)
        for collection, leaf in NORM_LEAVES
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_three_rounds_equal_pytorch(shared, stored, x64, optimized, name):
    values, _ = stored
    seen, norms, server = trained(name, shared)
    for k, domain in enumerate(DOMAINS):
        for round, (metrics, logits) in enumerate(seen):
            prefix = f"{name}__round{round}"
            close(metrics["step_loss"][k], values[f"{prefix}__loss__{domain}"])
            close(logits[k], values[f"{prefix}__logits__{domain}"])
        for (i, leaf), found in norms.items():
            close(found[k], values[f"{name}__final__{domain}__bn{i}__{leaf}"])
    # The averaged parameters have the stored norms, layer by layer.
    names = {"conv": "conv", "fc": "dense", "bn": "norm"}
    leaves = {"weight": ("kernel", "scale"), "bias": ("bias", "bias")}
    prefix = f"{name}__final__server_norm__"
    for key in (key for key in values if key.startswith(prefix)):
        layer, leaf = key.removeprefix(prefix).split(".")
        kind, number = layer[:-1], layer[-1]
        module = "head" if layer == "fc3" else names[kind] + number
        close(np.linalg.norm(server["params"][module][leaves[leaf][kind == "bn"]]), values[key])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedbn"])
def test_the_unseen_stream_of_tsmobn_equals_pytorch(shared, stored, x64, optimized, name):
    values, data = stored
    model, variables = DigitCNN(), trained(name, shared)[-1]
    images = pixels(data["usps__test_images"][:160].astype(np.float64))
    stream = jnp.asarray(images).reshape(5, 32, *images.shape[1:])

    @jax.jit
    def logits(variables, momenta):
        """Plain ones, and by TsmoBN for each momentum; one loop over the batches."""
        adapts = [adaptation.tsmobn(model, momentum) for momentum in momenta]

        def step(carries, batch):
            passed = [a.predict(variables, c, batch) for a, c in zip(adapts, carries, strict=True)]
            tracked, carries = zip(*passed, strict=True)
            return list(carries), (model.apply(variables, batch), *tracked)

        started = [adapt.init(variables) for adapt in adapts]
        return [one.reshape(160, -1) for one in jax.lax.scan(step, started, stream)[1]]

    plain, *tracked = logits(variables, [0.9, 0.0])
    close(plain, values[f"{name}__server_usps"])
    for ours, momentum in zip(tracked, (0.9, 0.0), strict=True):
        close(ours, values[f"{name}__tsmobn_usps__momentum{momentum}"])


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)
