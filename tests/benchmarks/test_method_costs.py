"""The passes in benchmarks/method_costs.py are those that a round is traced to."""

import functools
import runpy

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from fedjax_bn.normalization import BatchNorm
from method_table import METHODS

BATCH = (2, 2, 16)


class Deep(nn.Module):
    """Equal layers, whose products are nearly all that is counted."""

    def setup(self):
        self.head = nn.Dense(2)

    @nn.compact
    def features(self, x):
        for _ in range(4):
            x = nn.relu(BatchNorm()(nn.Dense(64)(x)))
        return x.mean((1, 2))

    def classify(self, features):
        return self.head(features)

    def __call__(self, x):
        return self.classify(self.features(x))


@pytest.fixture
def benchmark(folder):
    return runpy.run_path(str(folder / "method_costs.py"), run_name="benchmark")


@functools.cache
def products(name, **options):
    """Operations of matrix products in a round."""
    from on_accelerator.flops import of_function

    method, key = METHODS[name](Deep(), optax.sgd(0.1), **options), jax.random.key(0)
    batches = {
        "image": jnp.zeros((*BATCH, 6, 6, 3)),
        "label": jnp.zeros(BATCH, jnp.int32),
        "valid": jnp.ones(BATCH, bool),
    }
    variables = jax.eval_shape(Deep().init, key, batches["image"][0, 0])
    state = jax.eval_shape(lambda v: method.init(key, v, BATCH[0]), variables)
    return of_function(method.round, state, batches, key)


def test_every_method_has_its_passes(benchmark):
    assert {*benchmark["PASSES"]} == {*METHODS}


TRACED = (
    *("apfl", "ditto", "fedala", "fedcd", "feddg", "fedig", "fediga", "fedrep", "fedsam"),
    *("gperxan", "hbn", "l2d", "moon", "perfedavg", "randconv", "scaffold"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_a_round_is_traced_to_the_passes_that_predict_its_time(benchmark, name):
    options = benchmark["OPTIONS"].get(name, {})
    found = products(name, **options) / products("fedavg")
    assert found == pytest.approx(benchmark["predicted_of"](name), rel=0.07)
