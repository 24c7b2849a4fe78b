"""FedSAM, FedASAM and FedGAMMA: their point by NumPy, and what they reduce to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from federations import (
    CLASSES,
    FEATURES,
    OneNorm,
    PlainNet,
    assert_close,
    assert_equal,
    batches_of,
    global_variables,
    in_float64,
    once,
    run_rounds,
    variables_of,
)
from fedjax_bn.methods import fedavg, fedsam, scaffold
from fedjax_bn.rivals.fedsam import _ascend, sharpness_aware

SIZES = (9, 4, 6)
SGD = optax.sgd(0.1, momentum=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda *a: fedsam(*a, rho=0.0), fedavg),
        (lambda *a: fedsam(*a, rho=0.0, variates=True), scaffold),
    ],
    ids=["fedavg", "scaffold"],
)
def test_at_distance_0_it_is_the_plain_method_to_the_bit(ours, theirs):
    states = [
        run_rounds(method, variables_of(OneNorm()), batches_of(SIZES), rounds=2)[0]
        for method in (ours(OneNorm(), SGD), once(theirs, OneNorm(), SGD))
    ]
    assert_equal(*states)


def softmax_gradient(w, x, y):
    """The gradient of the mean cross entropy of softmax regression, and its value."""
    z = x @ w["kernel"] + w["bias"]
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    residual = (p - np.eye(CLASSES)[y]) / len(x)
    return {"kernel": x.T @ residual, "bias": residual.sum(0)}, -np.log(p[np.arange(len(x)), y])


def step_by_hand(w, x, y, rho, eta, rate=0.1):
    """The formula, leaf by leaf: T is |w| + eta for the kernel and 1 for the bias."""
    g, loss = softmax_gradient(w, x, y)
    t = {"kernel": np.abs(w["kernel"]) + eta if eta else 1.0, "bias": 1.0}
    norm = np.sqrt(sum(np.square(t[n] * g[n]).sum() for n in w))
    worst = {n: w[n] + rho * t[n] ** 2 * g[n] / norm for n in w}
    return {n: w[n] - rate * softmax_gradient(worst, x, y)[0][n] for n in w}, loss.mean()


@pytest.mark.parametrize(("rho", "eta"), [(0.5, 0.0), (0.7, 0.2)])
def test_a_step_goes_along_the_gradient_at_the_worst_point(x64, rho, eta):
    batches, variables = batches_of((4, 3)), in_float64(variables_of(PlainNet()))
    method = fedsam(PlainNet(), optax.sgd(0.1), rho=rho, eta=eta)
    state, metrics = run_rounds(method, variables, batches)
    expected = {"kernel": np.zeros((FEATURES, CLASSES)), "bias": np.zeros(CLASSES)}
    for k, size in enumerate((4, 3)):
        x, y = (np.asarray(batches[name][k, 0, :size]) for name in ("image", "label"))
        ours, loss = step_by_hand(variables["params"]["dense"], x, y, rho, eta)
        expected = {name: expected[name] + size / 7 * ours[name] for name in ours}
        np.testing.assert_allclose(metrics["loss"][k], loss, rtol=1e-10)
    assert_close(global_variables(state)["params"]["dense"], expected, rtol=1e-10)


def test_of_a_quadratic_the_gradient_is_exact(x64):
    """F = w'Hw / 2: the gradient at w + e is g + rho H g / ||g||."""
    random = np.random.default_rng(0)
    root, w = random.normal(size=(5, 5)), random.normal(size=5)
    hessian = root @ root.T

    def gradient(variables, batch, received, key):
        w = variables["params"]["w"]
        return {"params": {"w": hessian @ w}}, (w @ hessian @ w / 2, {})

    variables = {"params": {"w": jnp.asarray(w)}}
    found, (loss, _) = sharpness_aware(gradient, 0.3)(variables, {}, None, None)
    g = hessian @ w
    expected = g + 0.3 * hessian @ g / np.linalg.norm(g)
    np.testing.assert_allclose(found["params"]["w"], expected, rtol=1e-12)
    np.testing.assert_allclose(loss, w @ hessian @ w / 2, rtol=1e-12)


@pytest.mark.parametrize("eta", [0.0, 0.2])
def test_where_the_gradient_is_0_the_worst_point_is_the_point_itself(eta):
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}
    nowhere = jax.tree.map(jnp.zeros_like, params)
    assert_equal(_ascend(params, nowhere, 0.5, eta), params)


def test_running_statistics_move_once_a_step_by_the_pass_at_w():
    """In the first step: later ones start elsewhere."""
    variables, batches = variables_of(OneNorm()), batches_of((4, 4, 4), steps=3)
    ours, plain = (
        run_rounds(method, variables, batches)[0]
        for method in (fedsam(OneNorm(), SGD, rho=0.5), once(fedavg, OneNorm(), SGD))
    )
    assert_close(ours.shared["batch_stats"], plain.shared["batch_stats"], rtol=1e-6)


def test_variates_refuse_a_momentum_that_clients_keep():
    with pytest.raises(ValueError, match="fedsam with variates: keep_optimizer=True"):
        fedsam(OneNorm(), SGD, variates=True, keep_optimizer=True)
