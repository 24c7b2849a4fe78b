"""PN: a step by PyTorch, batches of one image, any batch norm, and variances above 0."""

import jax
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn.contrib import pn

TRAINED = ("params", "batch_stats")


def test_a_step_trains_mean_and_variance_as_pytorch_does(x64):
    torch = pytest.importorskip("torch")
    variables, batches = fed.in_float64(fed.variables_of(fed.OneNorm())), fed.batches_of((4,))
    state, metrics = fed.run_rounds(fed.once(pn, fed.OneNorm(), fed.SGD), variables, batches)
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
    fed.assert_close(state.shared, stepped, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(metrics["loss"], [loss.item()], rtol=1e-12)
    assert (state.shared["batch_stats"]["a"]["var"] != variables["batch_stats"]["a"]["var"]).all()


def test_a_step_takes_no_variance_below_0(x64):
    """Whichever way the steps lead."""
    variables = fed.in_float64(fed.variables_of(fed.OneNorm()))
    statistics = []
    for rate in (1e3, -1e3):
        state, _ = fed.run_rounds(
            pn(fed.OneNorm(), optax.sgd(rate)), variables, fed.batches_of((4,))
        )
        statistics.append(state.shared["batch_stats"]["a"])
    mean, var = (np.stack([leaf[name] for leaf in statistics]) for name in ("mean", "var"))
    assert (var == 0).any()
    assert (var >= 0).all()
    assert (mean < 0).any()


def test_a_batch_of_one_image_trains_and_a_batch_is_the_mean_of_its_images(x64):
    variables, four = fed.in_float64(fed.variables_of(fed.OneNorm())), fed.batches_of((4,))
    one = jax.tree.map(lambda leaf: leaf.reshape(4, 1, 1, *leaf.shape[3:]), four)
    together, _ = fed.run_rounds(fed.once(pn, fed.OneNorm(), fed.SGD), variables, four)
    alone, _ = fed.run_rounds(
        fed.once(pn, fed.OneNorm(), fed.SGD), variables, one
    )  # a client for each image
    fed.assert_close(alone.shared, together.shared, rtol=1e-11, atol=1e-13)
