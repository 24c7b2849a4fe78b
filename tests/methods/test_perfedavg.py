"""Per-FedAvg: halves of a batch, the second-order gradient, and testing by a few labels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from federations import (
    CLASSES,
    FEATURES,
    DropoutNet,
    NormNet,
    PlainNet,
    assert_close,
    batches_of,
    client,
    in_float64,
    variables_of,
)
from fedjax_bn.engine.batches import blank_padding
from fedjax_bn.local_step import differentiate
from fedjax_bn.methods.learning import learning, supervised
from fedjax_bn.methods.perfedavg import meta_gradient, personalize, split_valid
from fedjax_bn.state import Received

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("valid", "first", "second"),
    [
        ([1, 1, 1, 1], [0, 1], [2, 3]),
        ([1, 1, 1, 0], [0, 1], [2]),
        ([0, 1, 0, 1], [1], [3]),
        ([0, 0, 1, 0], [2], [2]),
        ([0, 0, 0, 0], [], []),
        ([1, 1, 1, 1, 1], [0, 1, 2], [3, 4]),
        ([1], [0], [0]),
    ],
)
def test_the_first_half_of_the_valid_samples_adapts_and_the_other_judges(valid, first, second):
    count = len(valid)
    batch = {
        "image": np.arange(count)[:, None],
        "label": np.arange(count),
        "valid": np.asarray(valid, bool),
        "last_epoch": np.ones((), bool),
    }
    halves = jax.device_get(jax.jit(split_valid)(batch))
    for half, expected in zip(halves, (first, second), strict=True):
        assert half["label"][half["valid"]].tolist() == expected
        assert half["image"][half["valid"]][:, 0].tolist() == expected
        assert half["last_epoch"].ndim == 0
        assert len(half["label"]) <= (count + 1) // 2


def objective_of(model):
    return supervised(learning(model)[0])


def personalized(model, *arrays, **options):
    """As one program, not one an operation."""
    return jax.jit(partial(personalize, model, **options))(*arrays)


def first_batch(size):
    """The batch of a federation of one client."""
    return {name: np.asarray(value)[0, 0] for name, value in batches_of((size,)).items()}


def test_second_order_gradient_is_the_first_order_one_times_one_minus_the_hessian(x64):
    start, batch = in_float64(variables_of(PlainNet())), first_batch(4)
    objective, received = objective_of(PlainNet()), Received((), ())
    flat, unravel = jax.flatten_util.ravel_pytree(start["params"])
    first, _ = jax.jit(split_valid)(batch)

    def loss(w):
        return objective({"params": unravel(w)}, first, received, KEY)[0]

    gradients = {
        order: jax.flatten_util.ravel_pytree(
            jax.jit(meta_gradient(objective, 0.3, order))(start, batch, received, KEY)[0]
        )[0]
        for order in (False, True)
    }
    factor = np.eye(len(flat)) - 0.3 * np.asarray(jax.jit(jax.hessian(loss))(flat))
    np.testing.assert_allclose(
        gradients[True], factor @ np.asarray(gradients[False]), rtol=1e-9, atol=1e-12
    )


def test_personalization_is_one_step_of_gradient_descent_on_the_labelled_samples(x64):
    start, batch = in_float64(variables_of(NormNet())), first_batch(3)
    ours = personalized(NormNet(), start, *batch.values(), inner_rate=0.2)
    gradient = differentiate(objective_of(NormNet()))

    def by_hand(start, batch):
        gradients, (_, moved) = gradient(start, blank_padding(batch), Received((), ()), KEY)
        params = jax.tree.map(lambda w, g: w - 0.2 * g, start["params"], gradients["params"])
        return {"params": params, **moved}

    assert_close(ours, jax.jit(by_hand)(start, batch), rtol=1e-12)
    short = {name: value[:3] for name, value in batch.items()}
    theirs = personalized(NormNet(), start, short["image"], short["label"], inner_rate=0.2)
    assert_close(ours, theirs, rtol=1e-10)


def test_personalization_works_inside_jit_and_over_clients():
    batch = {name: np.asarray(value)[:, 0] for name, value in batches_of((4, 4)).items()}
    both = jax.tree.map(lambda x: np.stack([x, x]), variables_of(NormNet()))

    @jax.jit
    @jax.vmap
    def adapt(variables, images, labels):
        return personalize(NormNet(), variables, images, labels, inner_rate=0.1, steps=3)

    adapted = adapt(both, batch["image"], batch["label"])
    one = personalized(
        NormNet(),
        variables_of(NormNet()),
        batch["image"][1],
        batch["label"][1],
        inner_rate=0.1,
        steps=3,
    )
    assert_close(client(adapted, 1), one, rtol=1e-4, atol=1e-5)


def test_more_steps_fit_the_labelled_samples_better():
    images = jax.random.normal(KEY, (6, FEATURES))
    labels = np.arange(6, dtype=np.int32) % CLASSES

    def loss(start, steps):
        own = personalize(NormNet(), start, images, labels, inner_rate=0.3, steps=steps)
        out, _ = NormNet().apply(own, images, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()

    losses = jax.jit(lambda start: [loss(start, steps) for steps in (0, 1, 5)])
    none, one, five = losses(variables_of(NormNet()))
    assert none > one > five


def test_personalization_feeds_dropout():
    images, labels = jax.random.normal(KEY, (4, FEATURES)), jnp.zeros(4, int)
    start = variables_of(DropoutNet())

    @jax.jit
    def adapt(key):
        return personalize(DropoutNet(), start, images, labels, inner_rate=0.1, key=key)

    ours, theirs = (adapt(jax.random.key(k)) for k in (1, 2))
    kernels = [np.asarray(tree["params"]["Dense_1"]["kernel"]) for tree in (ours, theirs)]
    assert abs(kernels[0] - kernels[1]).max() > 1e-4


def test_a_negative_inner_rate_is_refused():
    with pytest.raises(ValueError, match=r"inner_rate=-1\.0"):
        personalize(PlainNet(), {}, jnp.zeros((1, 2)), jnp.zeros(1), inner_rate=-1.0)
