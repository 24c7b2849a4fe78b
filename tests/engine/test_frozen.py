"""Frozen leaves: one copy, which nothing trains, sends, averages or remembers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from federations import (
    CLASSES,
    NAMED,
    ON_MAPS,
    SGD,
    NormNet,
    assert_close,
    assert_equal,
    batches_of,
    begun,
    in_float64,
    variables_of,
)
from fedjax_bn import methods, sharing
from fedjax_bn.federation import (
    broadcast_of,
    client_variables,
    global_variables,
    own_of,
    traffic,
)
from fedjax_bn.methods import fedavg, fedbn
from fedjax_bn.normalization import BatchNorm

OFTEN = ("fedbn", "moon", "fedsam")
MOMENTUM = optax.sgd(0.1, momentum=0.5)


class Body(nn.Module):
    """A dense layer whose gradient is zeroed by hand."""

    zeroed: bool

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (x.shape[-1], 2), x.dtype)
        return x @ (jax.lax.stop_gradient(kernel) if self.zeroed else kernel)


class Net(nn.Module):
    """`MapNet` after a body, which is to be frozen."""

    zeroed: bool = False
    norm: bool = True

    @nn.compact
    def __call__(self, x, train=False):
        x = Body(self.zeroed, name="body")(x.reshape(len(x), -1, 2))
        x = nn.relu(BatchNorm(name="norm")(x) if self.norm else x).mean(1)
        x = nn.Dropout(0.2)(x, deterministic=not train)
        return nn.Dense(CLASSES, name="out")(x)


def rounds(method, net, start, number=2):
    options = ON_MAPS.get(method.__name__, {})
    return method(net, MOMENTUM, clients="map", **options), start


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in methods.__all__],
)
def test_frozen_leaves_keep_their_bits_and_the_others_are_trained_as_if_zeroed(x64, name):
    found = {}
    options = ON_MAPS.get(name, {}) | NAMED.get(name, {})
    for zeroed in (False, True):
        net = Net(zeroed, name != "fedwon")
        more = {} if zeroed else {"frozen": sharing.at("body")}
        method = getattr(methods, name)(net, MOMENTUM, clients="map", **options, **more)
        start = in_float64(variables_of(Net(False, name != "fedwon")))
        state = begun(method, jax.random.key(1), start, 2)
        for _ in range(2):
            state, metrics = method.round(state, batches_of((8, 6)), jax.random.key(1))
        models = jax.jit(global_variables)(state), jax.jit(client_variables)(state)
        found[zeroed] = *models, metrics
        if not zeroed:
            assert_equal(
                state.frozen, {"params": {**_none(start), "body": start["params"]["body"]}}
            )
            rest = state._replace(frozen=())
            assert not [p for p, _ in jax.tree.leaves_with_path(rest) if "body" in str(p)]
    assert_close(*found.values(), 1e-9, 1e-12)


def _none(variables):
    return jax.tree.map(lambda _: None, variables["params"])
