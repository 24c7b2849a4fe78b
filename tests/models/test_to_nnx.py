"""An nnx user gets the trained weights back in a module of their own class."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fedjax_bn.adaptation import running
from fedjax_bn.contrib import ditto
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.methods import fedbn
from fedjax_bn.models import MLP, from_nnx, to_nnx


class Net(nnx.Module):
    """Layers in a list, whose numbers are names in the variables."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.layers = nnx.Sequential(
            nnx.Linear(6, 5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)
        )

    def __call__(self, images):
        return self.layers(self.norm(images))


SCALE = jnp.array([1.0, 3.0]).reshape(2, 1, 1, 1)
IMAGES = SCALE * jax.random.normal(jax.random.key(1), (2, 1, 8, 6))
LABELS = jnp.arange(16).reshape(2, 1, 8) % 3


@pytest.mark.parametrize("make", [fedbn, pytest.param(ditto, marks=pytest.mark.slow)])
def test_the_module_gives_the_outputs_of_the_trained_model(make):
    net, key = Net(nnx.Rngs(0)), jax.random.key(0)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    model = from_nnx(net)
    method = make(model, optax.sgd(0.5))
    state = method.init(key, model.init(key, IMAGES[0, 0]), 2)
    batches = {"image": IMAGES, "label": LABELS, "valid": LABELS >= 0}
    state, _ = method.round(state, batches, key)
    outputs = []
    for variables in (client_variables(state, 1), global_variables(state)):
        back = to_nnx(model, variables)
        assert type(back) is Net
        expected, _ = running(model).predict(variables, (), IMAGES[1, 0])
        np.testing.assert_allclose(back(IMAGES[1, 0]), expected, atol=1e-6)
        outputs.append(back(IMAGES[1, 0]))
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    back.train()  # it can be trained further
    nnx.grad(lambda net: net(IMAGES[0, 0]).sum())(back)


def test_what_is_not_the_modules_own_is_named():
    net = Net(nnx.Rngs(0))
    variables = from_nnx(net).init(jax.random.key(0), IMAGES[0, 0])
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), variables)
    with pytest.raises(ValueError, match="batch_stats/norm/mean"):
        to_nnx(net, stacked)
    with pytest.raises(ValueError, match="mask/features"):
        to_nnx(net, variables | {"mask": {"features": jnp.ones(5)}})
    with pytest.raises(ValueError, match="MLP"):
        to_nnx(MLP(), variables)
