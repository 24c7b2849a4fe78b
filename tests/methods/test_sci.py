"""SCI: parity with PyTorch, and the closed form of the gradient of a mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import small_oracle
from fedjax_bn.methods.learning import learning
from fedjax_bn.methods.sci import Alignment, aligned_objective
from fedjax_bn.models import SmallCNN, feature_masks
from fedjax_bn.state import Received
from small_oracle import SmallNet

KEY = jax.random.key(5)


def as_read(images, dtype):
    return images.astype(dtype)


def value_and_gradients(model, variables, batch, global_gradient, strength):
    """L_e, what is reported, and the gradients of L_e."""
    server = Alignment(global_gradient, jnp.ones((), jnp.int32))
    received = Received((), (), (), server)
    objective = aligned_objective(learning(model, prepare=as_read)[0], strength)

    @jax.jit
    def run(trained):
        return jax.value_and_grad(
            lambda t: objective({**variables, **t}, batch, received, KEY), has_aux=True
        )(trained)

    (value, reported), gradients = run({name: variables[name] for name in ("params", "mask")})
    return value, reported[1], gradients


def test_sci_gives_the_reference_numbers(shared, x64):
    stored = small_oracle.load(shared)
    variables = small_oracle.variables_from(stored, "init")
    variables["mask"] = {"features": jnp.asarray(stored["sci__mask"])}
    batch = {
        "image": jnp.asarray(stored["sci__x"]),
        "label": jnp.asarray(stored["sci__y"], jnp.int32),
        "valid": jnp.ones(8, bool),
    }
    total, reported, gradients = value_and_gradients(
        SmallNet(),
        variables,
        batch,
        {"features": jnp.asarray(stored["sci__global_gradient"])},
        float(stored["sci__lam"]),
    )
    close = partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-14)
    close(reported.loss, stored["sci__cross_entropy"])
    close(total, stored["sci__total"])
    close(reported.gradient["features"], stored["sci__mask_gradient"])
    close(gradients["mask"]["features"], stored["sci__grad__mask"])
    params = gradients["params"]
    for layer in ("fc1", "fc2"):
        close(params[layer]["kernel"].T, stored[f"sci__grad__{layer}.weight"])
        close(params[layer]["bias"], stored[f"sci__grad__{layer}.bias"])
    for ours, theirs in (("scale", "weight"), ("bias", "bias")):
        close(params["bn1"][ours], stored[f"sci__grad__bn1.{theirs}"])


def test_masks_inside_a_convolutional_network_are_differentiated_through_too(x64):
    model = SmallCNN(num_classes=3, widths=(3, 4), param_dtype=jnp.float64)
    images = jax.random.normal(KEY, (4, 6, 6, 3), jnp.float64)
    start = jax.jit(model.init)(KEY, images)
    variables = feature_masks.with_masks(model, start, ("features", "norm1"))
    batch = {"image": images, "label": jnp.array([0, 1, 2, 1]), "valid": jnp.ones(4, bool)}
    received = {"features": jnp.full(4, 0.01), "norm1": jnp.full(3, -0.02)}
    value, reported, gradients = value_and_gradients(model, variables, batch, received, 0.9)
    objective = aligned_objective(learning(model, prepare=as_read)[0], 0.9)
    server = Received((), (), (), Alignment(received, jnp.ones((), jnp.int32)))
    gaps = [jnp.square(g - received[n]).sum() for n, g in reported.gradient.items()]
    np.testing.assert_allclose(value, reported.loss + 0.9 * sum(gaps), rtol=1e-12)

    measure = jax.jit(lambda v: objective(v, batch, server, KEY))

    def slope(collection, way, of):
        """Derivative of a measured number along a way through one collection."""
        ends = []
        for sign in (1, -1):
            start = jax.device_get(variables[collection])
            moved = jax.tree.map(lambda x, d: x + sign * 1e-5 * d, start, way)  # noqa: B023
            ends.append(of(measure({**variables, collection: moved})))
        return (ends[0] - ends[1]) / 2e-5

    for collection in ("params", "mask"):
        slopes = jax.device_get(gradients[collection])
        way = jax.tree.map(lambda x: np.cos(np.arange(x.size)).reshape(x.shape), slopes)
        products = jax.tree.map(lambda g, d: (g * d).sum(), slopes, way)
        found = slope(collection, way, lambda measured: measured[0])
        np.testing.assert_allclose(sum(jax.tree.leaves(products)), found, rtol=1e-5)
    way = {"features": np.zeros(4), "norm1": np.eye(3)[0]}
    found = slope("mask", way, lambda measured: measured[1][1].loss)
    np.testing.assert_allclose(reported.gradient["norm1"][0], found, rtol=1e-5)
