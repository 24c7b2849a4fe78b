"""Which algorithm a convolution takes on CPU, and that a rule of one's own may say so."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.models.cpu import convolve, in_cache
from fedjax_bn.models.cpu.algorithms import ALGORITHMS
from fedjax_bn.models.cpu.choice import Shapes, by_table, choosing, chosen, differentiated_twice

PADDING = ((1, 1), (1, 1))
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 8)), jnp.float32)
KERNEL = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 8, 8)), jnp.float32)
SHAPES = Shapes(X.shape, KERNEL.shape, (1, 1), PADDING)


def convolved(x, kernel=KERNEL):
    return convolve(x, kernel, (1, 1), PADDING)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_trace_has_what_the_rule_of_its_context_names(name):
    traced = jax.jit(convolved).trace
    with choosing(lambda shapes: name):
        ours = str(traced(X).jaxpr)
    expected = jax.make_jaxpr(lambda x: ALGORITHMS[name](x, KERNEL, (1, 1), PADDING))(X)
    count = lambda text: [text.count(word) for word in ("dot_general", "conv_gen", "concat")]  # noqa: E731
    assert count(ours) == count(str(expected))


def test_inference_in_chunks_is_another_choice_than_training():
    asked = []

    def rule(shapes):
        asked.append(shapes)
        return by_table(shapes)

    with choosing(rule):
        jax.eval_shape(partial(in_cache, convolved), X)
        jax.eval_shape(convolved, X)
    assert asked == [SHAPES._replace(trained=False), SHAPES]
    assert len({*map(str, asked)}) == 2


@pytest.mark.parametrize(
    ("name", "strides", "says"),
    [("fast", (1, 1), "must be one of direct"), ("tiled", (2, 2), "other strides than 1")],
)
def test_a_rule_that_names_what_cannot_be_is_refused(name, strides, says):
    with choosing(lambda shapes: name), pytest.raises(ValueError, match=says):
        convolve(X, KERNEL, strides, PADDING)


def test_gradients_that_are_differentiated_take_matrix_products_where_these_fit_in_memory():
    stem = Shapes((16, 64, 64, 3), (7, 7, 3, 64), (2, 2), ((3, 3), (3, 3)))
    huge = stem._replace(images=(1024, 224, 224, 3))
    with differentiated_twice():
        assert chosen(stem) is ALGORITHMS["patches"]
        assert chosen(huge) is ALGORITHMS["direct"]
    assert chosen(stem) is ALGORITHMS["direct"]
