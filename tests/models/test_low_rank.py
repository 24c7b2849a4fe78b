"""Low-rank factors on dense layers, against NumPy in float64."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from fedjax_bn.models import ViTS16, from_nnx
from fedjax_bn.models.low_rank import all_but_factors, lora, merged, with_factors

KEY = jax.random.key(0)
VIT = ViTS16(3, width=8, depth=1, heads=2, patch=4, image_size=8, param_dtype=float)


class Linen(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(4, param_dtype=float, name="first")(x))
        return nn.Dense(2, param_dtype=float, name="out")(inputs=x)


class Nnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.first = nnx.Linear(5, 4, param_dtype=float, rngs=rngs)
        self.out = nnx.Linear(4, 2, param_dtype=float, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.first(x)))


def random_like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), tree)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("make", [Linen, lambda: from_nnx(Nnx(nnx.Rngs(0)))])
def test_outputs_and_gradients_are_numpys_and_merging_keeps_the_outputs(make):
    network = make()
    model = lora(network, rank=3, where=lambda path: True)
    x = np.random.default_rng(0).normal(size=(6, 5))
    start = jax.jit(model.init)(KEY, jnp.asarray(x))
    plain = jax.jit(network.init)(KEY, jnp.asarray(x))
    np.testing.assert_array_equal(model.apply(start, x), network.apply(plain, x))
    variables = random_like(start, 1)

    def loss(variables):
        y = model.apply(variables, jnp.asarray(x))
        return y.sum(), y

    (_, y), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables)
    first, out = (jax.tree.map(np.asarray, variables["params"][n]) for n in ("first", "out"))
    whole = [layer["kernel"] + layer["lora_a"] @ layer["lora_b"] for layer in (first, out)]
    hidden = np.tanh(x @ whole[0] + first["bias"])
    np.testing.assert_allclose(y, hidden @ whole[1] + out["bias"], rtol=1e-12, atol=1e-12)
    by_hidden = np.ones((6, 2)) @ whole[1].T * (1 - hidden**2)
    kernels = {"first": (first, x.T @ by_hidden), "out": (out, hidden.T @ np.ones((6, 2)))}
    for name, (layer, by_kernel) in kernels.items():
        ours = slopes["params"][name]
        np.testing.assert_allclose(ours["lora_a"], by_kernel @ layer["lora_b"].T, rtol=1e-10)
        np.testing.assert_allclose(ours["lora_b"], layer["lora_a"].T @ by_kernel, rtol=1e-10)
    joined = merged(variables)
    assert jax.tree.structure(joined) == jax.tree.structure(plain)
    np.testing.assert_allclose(network.apply(joined, x), y, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_factors_are_on_the_chosen_layers_of_a_vit_and_the_rest_can_be_frozen():
    images = jax.random.normal(KEY, (2, 8, 8, 3), float)
    model = lora(VIT, rank=2, where=lambda path: path.endswith(("qkv", "fc1")))
    plain = jax.jit(VIT.init)(KEY, images)
    variables = with_factors(KEY, model, plain, images)
    block = variables["params"]["block0"]
    assert {name for name, layer in block.items() if "lora_a" in layer} == {"qkv", "fc1"}
    assert block["qkv"]["lora_b"].shape == (2, 24)
    frozen = all_but_factors("head")(variables)
    trained = {path for path, leaf in flatten_dict(frozen, sep="/").items() if not leaf}
    factors = {f"params/block0/{layer}/lora_{ab}" for layer in ("fc1", "qkv") for ab in "ab"}
    assert trained == factors | {"params/head/bias", "params/head/kernel"}
    moved = random_like(variables, 2)
    read = partial(model.apply, method=lambda net, x: net.features(x))
    expected = jax.jit(partial(VIT.apply, method="features"))(merged(moved), images)
    features = jax.jit(read)(moved, images)
    np.testing.assert_allclose(features, expected, rtol=1e-9, atol=1e-10)


def test_a_choice_of_no_layer_names_the_layers():
    model = lora(Linen(), rank=2, where=lambda path: "block" in path)
    with pytest.raises(ValueError, match="first, out"):
        jax.eval_shape(model.init, KEY, jnp.zeros((1, 5)))
