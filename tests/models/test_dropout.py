"""Models of a user's own: dropout, and the nnx module of a trained model."""

import flax.linen as nn
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
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization.calls import PREDICTING, TRAINING

KEY = jax.random.key(0)
IMAGES = jnp.ones((4, 6))


class Linen(nn.Module):
    """Dropout alone: outputs are 0 or twice the inputs."""

    def setup(self):
        self.dropout = nn.Dropout(0.5)


class Nnx(nnx.Module):
    """The same; `deterministic` of the call takes precedence over `net.train()`."""

    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


def model_of(kind, name, default=""):
    """A model whose `__call__` has an argument of that name, which the dropout gets."""
    scope, sign = {}, "not " * (name in TRAINING)
    body = f"return self.dropout(x, deterministic={sign}{name})"
    exec(f"def call(self, x, {name}{default}): {body}", scope)
    namespace = {"__call__": scope["call"], "__module__": __name__}
    if kind == "nnx":
        return from_nnx(type("Net", (Nnx,), namespace)())
    return type("Net", (Linen,), namespace)()


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("name", TRAINING + PREDICTING)
def test_dropout_is_on_in_training_alone(kind, name):
    model = model_of(kind, name)
    trained = forward(model, {}, IMAGES, train=True, key=KEY).outputs
    assert set(np.unique(trained)) == {0, 2}
    np.testing.assert_array_equal(forward(model, {}, IMAGES).outputs, IMAGES)


class Attending(nn.Module):
    """Dropout inside attention, off by an argument that nothing sets."""

    @nn.compact
    def __call__(self, x, noisy=False):
        attend = nn.MultiHeadDotProductAttention(2, dropout_rate=0.5)
        return attend(nn.Dense(4)(x)[:, None], deterministic=not noisy)[:, 0]


UNUSUAL = [*(model_of(kind, "off", "=True") for kind in ("linen", "nnx")), Attending()]


@pytest.mark.parametrize("model", UNUSUAL)
def test_dropout_that_nothing_can_switch_on_is_refused_in_training(model):
    variables = model.init(KEY, IMAGES)
    assert forward(model, variables, IMAGES).outputs.shape[0] == 4
    with pytest.raises(ValueError, match="off in training"):
        forward(model, variables, IMAGES, train=True, key=KEY)


def test_a_model_without_such_an_argument_decides_itself():
    class Decided(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=True)(x)

    outputs = forward(Decided(), {}, IMAGES, train=True, key=KEY).outputs
    np.testing.assert_array_equal(outputs, IMAGES)


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
OF_LINEN = SCALE * jax.random.normal(jax.random.key(1), (2, 1, 8, 6))
LABELS = jnp.arange(16).reshape(2, 1, 8) % 3


@pytest.mark.parametrize("make", [fedbn, pytest.param(ditto, marks=pytest.mark.slow)])
def test_the_module_gives_the_outputs_of_the_trained_model(make):
    net, key = Net(nnx.Rngs(0)), jax.random.key(0)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    model = from_nnx(net)
    method = make(model, optax.sgd(0.5))
    state = method.init(key, model.init(key, OF_LINEN[0, 0]), 2)
    batches = {"image": OF_LINEN, "label": LABELS, "valid": LABELS >= 0}
    state, _ = method.round(state, batches, key)
    outputs = []
    for variables in (client_variables(state, 1), global_variables(state)):
        back = to_nnx(model, variables)
        assert type(back) is Net
        expected, _ = running(model).predict(variables, (), OF_LINEN[1, 0])
        np.testing.assert_allclose(back(OF_LINEN[1, 0]), expected, atol=1e-6)
        outputs.append(back(OF_LINEN[1, 0]))
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    back.train()  # it can be trained further
    nnx.grad(lambda net: net(OF_LINEN[0, 0]).sum())(back)


def test_what_is_not_the_modules_own_is_named():
    net = Net(nnx.Rngs(0))
    variables = from_nnx(net).init(jax.random.key(0), OF_LINEN[0, 0])
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), variables)
    with pytest.raises(ValueError, match="batch_stats/norm/mean"):
        to_nnx(net, stacked)
    with pytest.raises(ValueError, match="mask/features"):
        to_nnx(net, variables | {"mask": {"features": jnp.ones(5)}})
    with pytest.raises(ValueError, match="MLP"):
        to_nnx(MLP(), variables)
