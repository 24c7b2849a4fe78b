"""What a start spares: the same data and numbers in less time."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits, load_sample_image

from fedjax_bn import models
from fedjax_bn.data.sets import scanners
from fedjax_bn.engine.backend import for_one_run


def test_handwriting_and_photograph_are_those_of_scikit_learn_without_its_import(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)  # not importable
    ink, labels = scanners.handwriting()
    photograph = scanners.to_pixels(scanners.shrunk_photograph("china", 4, np.float64))
    monkeypatch.undo()
    digits, image = load_digits(), load_sample_image("china.jpg")
    np.testing.assert_array_equal(ink * 16, digits.images)
    np.testing.assert_array_equal(labels, digits.target)
    assert photograph.shape == (image.shape[0] // 4, image.shape[1] // 4, 3)
    np.testing.assert_allclose(photograph[0, 0], image[:4, :4].mean((0, 1)), atol=0.5 + 1e-6)


@pytest.mark.slow
def test_a_program_for_one_run_gives_the_bits_of_any_other(optimized):
    def init(key):
        return models.SmallCNN(widths=(16,)).init(key, jnp.zeros((2, 8, 8, 3)))

    key = jax.random.key(0)
    quick = for_one_run(init)
    jax.tree.map(np.testing.assert_array_equal, quick(key), jax.jit(init)(key))
    # What only asks for the form of the result traces it inside another program.
    assert jax.eval_shape(quick, key) == jax.eval_shape(init, key)
