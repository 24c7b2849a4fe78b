"""TsmoBN against Algorithm 1 in NumPy, and as a stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import norm_nets as nets
from fedjax_bn import adaptation
from fedjax_bn.normalization import tsmobn

MODEL = nets.HandMade()


def algorithm(batches, momentum, about="tracked"):
    """Algorithm 1 on flat batches [n, C], literally; the pair after each batch."""
    pairs, mean, var = [], None, None
    for x in batches:
        if mean is None:
            mean, var = x.mean(0), ((x - x.mean(0)) ** 2).mean(0)
        else:
            mean = momentum * mean + (1 - momentum) * x.mean(0)
            centre = mean if about == "tracked" else x.mean(0)
            var = momentum * var + (1 - momentum) * ((x - centre) ** 2).mean(0)
        pairs.append((mean, var))
    return pairs


@jax.jit
def tracked(momentum, variables, carry, images, valid):
    """One program for all momenta."""
    return adaptation.tsmobn(MODEL, momentum).predict(variables, carry, images, valid)


def stream(momentum, variables, batches, valid=None):
    """All logits, batch after batch."""
    carry, logits = adaptation.tsmobn(MODEL).init(variables), []
    for i, images in enumerate(batches):
        given = carry, images, None if valid is None else valid[i]
        out, carry = tracked(momentum, variables, *given)
        logits.append(out)
    return logits, carry


@pytest.mark.parametrize(
    ("about", "momentum"), [("tracked", 0.0), ("tracked", 0.3), ("batch", 0.9)]
)
@pytest.mark.parametrize("shape", [(5, 3), (5, 4, 2, 3)])
def test_update_is_algorithm_1(x64, shape, momentum, about):
    random, tracked = np.random.default_rng(0), None
    batches = [random.normal(3, 2, shape) * [1, 10, 0.1] for _ in range(4)]
    expected = algorithm([x.reshape(-1, 3) for x in batches], momentum, about)
    for x, pair in zip(batches, expected, strict=True):
        tracked = tsmobn.update(tracked, jnp.asarray(x), momentum, about=about)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), tracked, pair)


def test_the_model_is_normalized_with_the_tracked_pair(x64):
    images = nets.images_of(12).reshape(3, 4, 6, 6, 3)
    variables = nets.variables_of(MODEL, images[0])
    logits, carry = stream(0.8, variables, images)
    inputs = []
    for batch in images:
        kernel = variables["params"]["block"]["conv"]
        inputs.append(np.asarray(batch @ kernel["kernel"] + kernel["bias"]).reshape(-1, 8))
    mean, var = algorithm(inputs, 0.8)[-1]
    tracked = carry.statistics["block"]["inner"]
    np.testing.assert_allclose(tracked["mean"], mean, rtol=1e-11)
    np.testing.assert_allclose(tracked["var"], var, rtol=1e-11)
    # What is tracked after the last batch is what normalized the last batch.
    plain = MODEL.apply({**variables, "batch_stats": carry.statistics}, images[-1])
    np.testing.assert_allclose(logits[-1], plain, rtol=1e-11)


def test_batches_without_valid_samples_are_as_if_never_seen(x64):
    images = nets.images_of(8).reshape(2, 4, 6, 6, 3)
    variables = nets.variables_of(MODEL, images[0])
    expected, _ = stream(0.6, variables, images)
    nothing = jnp.full_like(images[0], 1e3)
    batches = [nothing, images[0], nothing, images[1]]
    valid = [jnp.full(4, i % 2 == 1) for i in range(4)]
    logits, _ = stream(0.6, variables, batches, valid)
    for ours, theirs in ((logits[1], expected[0]), (logits[3], expected[1])):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    assert all(np.isfinite(out).all() for out in logits)
