"""PN: a step by PyTorch, batches of one image, any batch norm, and variances above 0."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from federations import (
    CLASSES,
    SGD,
    MapNet,
    OneNorm,
    assert_close,
    batches_of,
    global_variables,
    in_float64,
    once,
    run_rounds,
    variables_of,
)
from fedjax_bn import adaptation
from fedjax_bn.contrib import pn
from fedjax_bn.contrib.pn import with_trained_variances
from fedjax_bn.engine.privacy import gaussian
from fedjax_bn.local_step import LocalStep
from fedjax_bn.state import Received

KEY, SIZES = jax.random.key(1), (9, 4, 6)
TRAINED = ("params", "batch_stats")


class FlaxNet(nn.Module):
    """`OneNorm` with flax's own batch norm."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="bn")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, name="a")(x))
        return nn.Dense(CLASSES, name="c")(x)


def test_a_step_trains_mean_and_variance_as_pytorch_does(x64):
    torch = pytest.importorskip("torch")
    variables, batches = in_float64(variables_of(OneNorm())), batches_of((4,))
    state, metrics = run_rounds(once(pn, OneNorm(), SGD), variables, batches)
    own = {name: variables[name] for name in TRAINED}
    own = jax.tree.map(lambda leaf: torch.tensor(np.array(leaf), requires_grad=True), own)
    params, stats = own["params"], own["batch_stats"]["a"]
    x = torch.tensor(np.array(batches["image"][0, 0]))
    x = x @ params["bn"]["kernel"] + params["bn"]["bias"]
    x = (x - stats["mean"]) / torch.sqrt(stats["var"] + 1e-5)
    x = torch.relu(x * params["a"]["scale"] + params["a"]["bias"])
    x = x @ params["c"]["kernel"] + params["c"]["bias"]
    label = torch.tensor(np.array(batches["label"][0, 0])).long()
    loss = torch.nn.functional.cross_entropy(x, label)
    loss.backward()
    stepped = jax.tree.map(lambda t: (t - 0.1 * t.grad).detach().numpy(), own)
    assert_close(state.shared, stepped, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(metrics["loss"], [loss.item()], rtol=1e-12)
    assert (state.shared["batch_stats"]["a"]["var"] != variables["batch_stats"]["a"]["var"]).all()


def test_a_batch_of_one_image_trains_and_a_batch_is_the_mean_of_its_images(x64):
    variables, four = in_float64(variables_of(OneNorm())), batches_of((4,))
    one = jax.tree.map(lambda leaf: leaf.reshape(4, 1, 1, *leaf.shape[3:]), four)
    together, _ = run_rounds(once(pn, OneNorm(), SGD), variables, four)
    alone, _ = run_rounds(once(pn, OneNorm(), SGD), variables, one)  # a client for each image
    assert_close(alone.shared, together.shared, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
def test_flaxs_batch_norm_trains_alike(x64):
    variables = in_float64(variables_of(OneNorm()))
    ours, theirs = (
        run_rounds(once(pn, net, SGD), variables, batches_of((4, 3)))[0].shared
        for net in (OneNorm(), FlaxNet())
    )
    assert_close(theirs, ours, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
def test_predictions_are_by_the_trained_statistics(x64):
    state, _ = run_rounds(
        once(pn, MapNet(), SGD), in_float64(variables_of(MapNet())), batches_of(SIZES)
    )
    served, x = global_variables(state), np.random.default_rng(0).normal(size=(3, 6))
    norm = {**served["params"]["norm"], **served["batch_stats"]["norm"]}
    y = (x.reshape(3, 3, 2) - norm["mean"]) / np.sqrt(norm["var"] + 1e-5)
    y = np.maximum(y * norm["scale"] + norm["bias"], 0).mean(1)
    out = served["params"]["out"]
    logits, _ = adaptation.running(MapNet()).predict(served, (), jnp.asarray(x))
    np.testing.assert_allclose(logits, y @ out["kernel"] + out["bias"], rtol=1e-10)


def test_a_step_takes_no_variance_below_0():
    def update(variables, state, *rest):
        return jax.tree.map(lambda leaf: leaf - 1, variables), state, jnp.zeros(())

    variables = {
        "params": {"a": {"scale": np.zeros(2)}},
        "batch_stats": {"a": {"mean": np.zeros(2), "var": np.array([0.25, 3.0])}},
    }
    step = with_trained_variances(LocalStep(lambda variables: (), update))
    found, _, _ = step.update(variables, (), {}, Received({}, {}), KEY)
    np.testing.assert_array_equal(found["batch_stats"]["a"]["var"], [0, 2])
    np.testing.assert_array_equal(found["batch_stats"]["a"]["mean"], [-1, -1])
    np.testing.assert_array_equal(found["params"]["a"]["scale"], [-1, -1])


def test_privacy_is_refused():
    with pytest.raises(ValueError, match="shares running statistics"):
        run_rounds(
            pn(OneNorm(), SGD, privacy=gaussian(1.0, 1.0)),
            variables_of(OneNorm()),
            batches_of(SIZES),
        )
