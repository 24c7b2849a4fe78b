"""FedFA, PN and FedRDN train a U-Net on masks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_bn import methods
from fedjax_bn.federation import client_variables
from fedjax_bn.models import UNet
from fedjax_bn.models.forward import forward
from fedjax_bn.task import segmentation

KEY = jax.random.key(0)
NAMES = ("fedfa", "pn", "fedrdn")
NET, TASK = UNet(width=2, levels=1), segmentation(2)


def scans():
    """Two clients of different brightness, two steps of two images with bright squares."""
    random = np.random.default_rng(0)
    image = random.normal(0, 0.3, (2, 2, 2, 8, 8, 3))
    mask = np.zeros(image.shape[:-1], np.uint8)
    mask[..., 2:6, 3:7] = 1
    image = image + 2 * mask[..., None] + np.array([0.0, 3.0]).reshape(2, 1, 1, 1, 1, 1)
    return {
        "image": jnp.asarray(image, jnp.float32),
        "label": {"mask": jnp.asarray(mask)},
        "valid": jnp.ones(image.shape[:3], bool),
    }


def started(name):
    method = getattr(methods, name)(NET, optax.sgd(0.1), task=TASK)
    variables = jax.eval_shape(NET.init, KEY, scans()["image"][0, 0])
    return method, jax.eval_shape(lambda v: method.init(KEY, v, 2), variables)


@pytest.mark.parametrize("name", NAMES)
def test_a_round_takes_masks(name):
    """Nothing is compiled here; that losses fall is shown by the slow test below."""
    method, state = started(name)
    after, metrics = jax.eval_shape(method.round, state, scans(), KEY)
    assert metrics["loss"].shape == (2,)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rounds_on_masks_lower_the_loss_and_give_a_score(name):
    method = getattr(methods, name)(NET, optax.sgd(0.1), task=TASK)
    batches = scans()
    variables = jax.jit(NET.init)(KEY, batches["image"][0, 0])
    state = jax.jit(method.init, static_argnums=2)(KEY, variables, 2)
    losses = []
    for _ in range(4):
        state, metrics = method.round(state, batches, KEY)
        assert metrics["finite"].all()
        losses.append(np.asarray(metrics["loss"]))
    assert (losses[-1] < losses[0]).all()
    logits = forward(NET, client_variables(state, 0), batches["image"][0, 0]).outputs
    assert logits.shape == (2, 8, 8, 2)
    assert 0 <= TASK.score(logits, {"mask": batches["label"]["mask"][0, 0]}) <= 100
