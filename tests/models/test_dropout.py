"""Dropout is on in training and off in prediction, whatever a model calls the argument for it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_bn.models import from_nnx
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
