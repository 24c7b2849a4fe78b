"""Models without batch norm: with group norm, with layer norm, with none."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from federations import CLASSES, FEATURES, NEED_MAPS, batches_of, variables_of
from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.models import from_nnx
from method_table import METHODS

KEY = jax.random.key(2)
NEED_BATCH_NORM = {"fedbn", "silobn", "fedig", "fediga", "fixbn", "hbn", "copa", "csac", "pn"}
NEED_BATCH_NORM |= {"gperxan"}
OTHERS = sorted(set(METHODS) - NEED_BATCH_NORM - set(NEED_MAPS))


class Net(nn.Module):
    """A hidden layer and what normalizes it."""

    norm: str

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        if self.norm == "layer":
            x = nn.LayerNorm()(x)
        return nn.Dense(CLASSES)(nn.relu(x))


class Grouped(nnx.Module):
    """In nnx, with group norm."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(FEATURES, 8, rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.out = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.hidden(x))))


NETS = {"none": Net("none"), "layer": Net("layer"), "group": from_nnx(Grouped(nnx.Rngs(0)))}


# Each has seams of its own; the others share theirs with one of them.
FEW = ("fedavg", "scaffold", "perfedavg", "fedcd", "fedsam", "fedsr")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in OTHERS]
)
def test_a_method_that_needs_no_batch_norm_takes_any_norm(name):
    batches = batches_of((4, 3))
    for net in NETS.values():
        method = METHODS[name](net, optax.sgd(0.1), clients="map")
        state = method.init(KEY, variables_of(net), 2)
        new, metrics = jax.eval_shape(method.round, state, batches, KEY)
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
        assert metrics["loss"].shape == (2,)


@pytest.mark.parametrize("name", sorted(NEED_BATCH_NORM))
def test_a_method_that_keeps_batch_norms_refuses_a_model_without_any(name):
    for net in NETS.values():
        with pytest.raises(ValueError, match="batch norm"):
            METHODS[name](net, optax.sgd(0.1)).init(KEY, variables_of(net), 2)


ANY_NORM = {"running", "ensemble", "tent", "sar", "shot", "t3a", "atp"}


@pytest.mark.parametrize("name", sorted(set(ADAPTATIONS) - ANY_NORM))
def test_an_adaptation_of_batch_norms_refuses_a_model_without_any(name):
    x = jnp.zeros((2, FEATURES))
    for net in NETS.values():
        options = {"view": lambda key, x: x} if name == "mixnorm" else {}
        adapt, variables = ADAPTATIONS[name](net, **options), variables_of(net)
        with pytest.raises(ValueError, match="batch norm"):
            adapt.predict(variables, adapt.init(variables), x)


@pytest.mark.parametrize("name", ["tent", "shot", "t3a", "atp"])
def test_an_adaptation_that_learns_takes_any_norm(name):
    x = jnp.arange(2.0 * FEATURES).reshape(2, FEATURES)
    for kind, net in NETS.items():
        adapt, variables = ADAPTATIONS[name](net), variables_of(net)
        if name == "tent" and kind == "none":
            with pytest.raises(ValueError, match="Net has none"):
                adapt.init(variables)
            continue
        predict, carry = jax.jit(adapt.predict), adapt.init(variables)
        for _ in range(2):
            logits, carry = predict(variables, carry, x)
        assert np.abs(logits - net.apply(variables, x)).max() > 0
