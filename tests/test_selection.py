"""Local selection: the best state of a round, wherever in the round it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn import local
from fedjax_bn.local import LocalStep, Received
from fedjax_bn.selection import best_of_round


def update(variables, state, batch, received, key):
    del received, key
    value = variables["params"] + batch["image"].sum()
    return {"params": value}, state + 1, value


COUNTING = LocalStep(init=lambda variables: jnp.zeros((), jnp.int32), update=update)
START = {"params": jnp.zeros(())}
NOWHERE = Received({}, {})


def batches(steps):
    valid = jnp.ones((steps, 1), bool)
    return {
        "image": jnp.ones((steps, 1)),
        "label": jnp.zeros((steps, 1), jnp.int32),
        "valid": valid,
    }


def near(target):
    return lambda variables, received: -jnp.abs(variables["params"] - target)


def train(score, every, steps):
    select = best_of_round(score, every)
    return select(
        COUNTING, NOWHERE, START, jnp.zeros((), jnp.int32), batches(steps), jax.random.key(0)
    )


@pytest.mark.parametrize(
    ("target", "every", "steps", "best"),
    [
        (7, 2, 10, 6),  # between 6 and 8: the first of equals
        (100, 2, 10, 10),
        (0, 2, 10, 2),  # what was received is no candidate
        (10, 4, 10, 10),  # the last steps are no whole chunk
        (9, 3, 9, 9),
        (3, 50, 10, 10),
    ],
)
def test_the_state_with_the_best_score_is_kept(target, every, steps, best):
    trained = train(near(target), every, steps)
    np.testing.assert_array_equal(trained.variables["params"], best)
    np.testing.assert_array_equal(trained.losses, np.arange(1, steps + 1))
    np.testing.assert_array_equal(trained.counts, 1)
    np.testing.assert_array_equal(trained.state, steps)


def test_a_rising_score_gives_plain_training():
    selected = train(lambda variables, received: variables["params"], 3, 8)
    plain = local.train(
        COUNTING, NOWHERE, START, jnp.zeros((), jnp.int32), batches(8), jax.random.key(0)
    )
    jax.tree.map(np.testing.assert_array_equal, selected, plain)


def test_each_client_selects_for_itself_under_vmap():
    def one(target):
        return train(near(target), 2, 8).variables["params"]

    np.testing.assert_array_equal(jax.vmap(one)(jnp.asarray([2.0, 6.0, 8.0])), [2, 6, 8])


def test_every_below_one_is_an_error():
    with pytest.raises(ValueError, match="every=0"):
        best_of_round(near(0), 0)
