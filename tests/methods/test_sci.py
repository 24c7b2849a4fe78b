"""SCI: parity with PyTorch, and the closed form of the gradient of a mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import small_oracle
from federations import assert_close
from fedjax_bn.methods.learning import learning
from fedjax_bn.methods.sci import Alignment, aligned_objective
from fedjax_bn.models import SmallCNN, masks
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


def case(seed, count=8, padded=0):
    """A network, masks, a batch whose last samples are padding, and a received gradient."""
    random = np.random.default_rng(seed)
    model = SmallNet()
    variables = jax.tree.map(
        lambda leaf: jnp.asarray(random.uniform(-0.5, 0.5, leaf.shape)),
        jax.eval_shape(model.init, KEY, jnp.zeros((2, 12), jnp.float32)),
    )
    variables["mask"] = {"features": jnp.asarray(random.uniform(-0.5, 1.5, 16))}
    batch = {
        "image": jnp.asarray(random.normal(size=(count, 12))),
        "label": jnp.asarray(random.integers(0, 4, count), jnp.int32),
        "valid": jnp.arange(count) < count - padded,
    }
    return model, variables, batch, {"features": jnp.asarray(0.1 * random.normal(size=16))}


@pytest.mark.parametrize(
    ("seed", "strength"), [(1, 30.0), pytest.param(0, 0.5, marks=pytest.mark.slow)]
)
def test_sci_equals_pytorch_on_other_masks_batches_and_lambdas(seed, strength, x64):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    model, variables, batch, received = case(seed, count=5 + 3 * (seed % 2))
    value, reported, gradients = value_and_gradients(model, variables, batch, received, strength)

    tensor = lambda x: torch.tensor(np.asarray(x), requires_grad=True)  # noqa: E731
    params = jax.tree.map(tensor, {name: variables[name] for name in ("params", "mask")})
    fc1, bn, fc2 = (params["params"][name] for name in ("fc1", "bn1", "fc2"))
    x = torch.tensor(np.asarray(batch["image"])) @ fc1["kernel"] + fc1["bias"]
    x = functional.batch_norm(x, None, None, bn["scale"], bn["bias"], training=True)
    mask = params["mask"]["features"]
    logits = (torch.relu(x) * mask) @ fc2["kernel"] + fc2["bias"]
    labels = torch.tensor(np.asarray(batch["label"]), dtype=torch.long)
    loss = functional.cross_entropy(logits, labels)
    (own,) = torch.autograd.grad(loss, mask, create_graph=True)
    gap = own - torch.tensor(np.asarray(received["features"]))
    total = loss + strength * gap.pow(2).sum()
    total.backward()

    close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    close(value, total.item())
    close(reported.loss, loss.item())
    close(reported.gradient["features"], own.detach())
    jax.tree.map(lambda ours, theirs: close(ours, theirs.grad), gradients, params)


@settings(max_examples=1, deadline=None)
@given(seed=st.integers(0, 1000), padded=st.integers(1, 3))
def test_the_closed_form_of_the_mask_gradient_is_the_autodiff_one_and_so_is_its_gradient(
    seed, padded
):
    with jax.enable_x64(True):
        model, variables, batch, received = case(seed, padded=padded)
        valid = np.asarray(batch["valid"])
        value, reported, gradients = value_and_gradients(model, variables, batch, received, 0.7)

        def by_hand(trained):
            """L_e without an inner differentiation: dL/dm_j = 1/n sum_i f_ij (W r_i)_j."""
            p, mask = trained["params"], trained["mask"]["features"]
            x = batch["image"] @ p["fc1"]["kernel"] + p["fc1"]["bias"]
            mean = x[valid].mean(0)
            normal = (x - mean) / jnp.sqrt(jnp.square(x[valid] - mean).mean(0) + 1e-5)
            features = jnp.maximum(normal * p["bn1"]["scale"] + p["bn1"]["bias"], 0)
            w, b = p["fc2"]["kernel"], p["fc2"]["bias"]
            logs = jax.nn.log_softmax((features * mask) @ w + b)
            residuals = jnp.exp(logs) - jax.nn.one_hot(batch["label"], len(b), dtype=logs.dtype)
            own = (features * (residuals @ w.T))[valid].mean(0)
            loss = -logs[jnp.arange(8), batch["label"]][valid].mean()
            return loss + 0.7 * jnp.square(own - received["features"]).sum(), own

        trained = {name: variables[name] for name in ("params", "mask")}
        (theirs, own), slopes = jax.jit(jax.value_and_grad(by_hand, has_aux=True))(trained)
        np.testing.assert_allclose(reported.gradient["features"], own, rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(value, theirs, rtol=1e-11)
        assert_close(gradients, slopes, rtol=1e-8, atol=1e-12)


def test_masks_inside_a_convolutional_network_are_differentiated_through_too(x64):
    model = SmallCNN(num_classes=3, widths=(3, 4), param_dtype=jnp.float64)
    images = jax.random.normal(KEY, (4, 6, 6, 3), jnp.float64)
    start = jax.jit(model.init)(KEY, images)
    variables = masks.with_masks(model, start, ("features", "norm1"))
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
