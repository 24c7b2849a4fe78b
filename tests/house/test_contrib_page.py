"""What docs/contrib.md says that a method sends is what its state holds."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

from fedjax_bn import methods
from fedjax_bn.models import SmallCNN
from runs import ROOT

ROWS = re.findall(r"^\| `(\w+)`.*\| ([^|]+) \|$", (ROOT / "docs/contrib.md").read_text(), re.M)
QUIET = [name for name, sends in ROWS if sends.startswith("nothing") and hasattr(methods, name)]
LOUD = ["csac", "csd", "fedadg", "fedfa", "fedrdn", "fedsr", "gperxan"]
LOUD += ["harmofl", "jigen", "l2d", "selfreg", "snr"]


def collections_of(name):
    """The collections that a method shares beside the model's, and what it broadcasts beside."""
    norm = "none" if name == "fedwon" else "batch"
    model = SmallCNN(widths=(4, 4, 4), norm=norm)
    method = getattr(methods, name)(model, optax.sgd(0.1))

    def start():
        key = jax.random.key(0)
        return method.init(key, model.init(key, jnp.zeros((2, 16, 16, 3))), 2)

    state = jax.eval_shape(start)
    shared = {name for name, tree in state.shared.items() if jax.tree.leaves(tree)}
    return shared - {"params", "batch_stats"}, jax.tree.leaves(state.server.sent)


@pytest.mark.parametrize("name", QUIET)
def test_a_method_of_which_the_page_says_nothing_shares_the_model_alone(name):
    assert collections_of(name) == (set(), [])


@pytest.mark.parametrize("name", LOUD)
def test_a_method_that_adds_layers_is_named_as_one_that_sends_them(name):
    assert any(collections_of(name))
    assert name in dict(ROWS)
    assert name not in QUIET
