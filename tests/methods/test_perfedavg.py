"""Per-FedAvg: halves of a batch, the second-order gradient, and testing by a few labels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import federations as fed
from fedjax_bn.engine.batches import blank_padding
from fedjax_bn.local_step import differentiate
from fedjax_bn.methods.learning import learning, supervised
from fedjax_bn.methods.perfedavg import personalize
from fedjax_bn.state import Received

KEY = jax.random.key(0)


def objective_of(model):
    return supervised(learning(model)[0])


def personalized(model, *arrays, **options):
    """As one program, not one an operation."""
    return jax.jit(partial(personalize, model, **options))(*arrays)


def first_batch(size):
    """The batch of a federation of one client."""
    return {name: np.asarray(value)[0, 0] for name, value in fed.batches_of((size,)).items()}


def test_personalization_is_one_step_of_gradient_descent_on_the_labelled_samples(x64):
    start, batch = fed.in_float64(fed.variables_of(fed.NormNet())), first_batch(3)
    ours = personalized(fed.NormNet(), start, *batch.values(), inner_rate=0.2)
    gradient = differentiate(objective_of(fed.NormNet()))

    def by_hand(start, batch):
        gradients, (_, moved) = gradient(start, blank_padding(batch), Received((), ()), KEY)
        params = jax.tree.map(lambda w, g: w - 0.2 * g, start["params"], gradients["params"])
        return {"params": params, **moved}

    fed.assert_close(ours, jax.jit(by_hand)(start, batch), rtol=1e-12)
    short = {name: value[:3] for name, value in batch.items()}
    theirs = personalized(fed.NormNet(), start, short["image"], short["label"], inner_rate=0.2)
    fed.assert_close(ours, theirs, rtol=1e-10)


def test_personalization_works_inside_jit_and_over_clients():
    batch = {name: np.asarray(value)[:, 0] for name, value in fed.batches_of((4, 4)).items()}
    both = jax.tree.map(lambda x: np.stack([x, x]), fed.variables_of(fed.NormNet()))

    @jax.jit
    @jax.vmap
    def adapt(variables, images, labels):
        return personalize(fed.NormNet(), variables, images, labels, inner_rate=0.1, steps=3)

    adapted = adapt(both, batch["image"], batch["label"])
    one = personalized(
        fed.NormNet(),
        fed.variables_of(fed.NormNet()),
        batch["image"][1],
        batch["label"][1],
        inner_rate=0.1,
        steps=3,
    )
    fed.assert_close(fed.client(adapted, 1), one, rtol=1e-4, atol=1e-5)


def test_personalization_feeds_dropout():
    images, labels = jax.random.normal(KEY, (4, fed.FEATURES)), jnp.zeros(4, int)
    start = fed.variables_of(fed.DropoutNet())

    @jax.jit
    def adapt(key):
        return personalize(fed.DropoutNet(), start, images, labels, inner_rate=0.1, key=key)

    ours, theirs = (adapt(jax.random.key(k)) for k in (1, 2))
    kernels = [np.asarray(tree["params"]["Dense_1"]["kernel"]) for tree in (ours, theirs)]
    assert abs(kernels[0] - kernels[1]).max() > 1e-4
