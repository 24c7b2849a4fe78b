"""What a start spares: the same data, pictures and numbers in less time."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits, load_sample_image

from fedjax_bn import models
from fedjax_bn.data.sets import scanners
from fedjax_bn.engine.backend import compile_quickly, for_one_run, traced_for
from fedjax_bn.training.data_plots import _in_a_row


def background() -> np.ndarray:
    return scanners.to_pixels(scanners.shrunk_photograph("china", 4, np.float64))


def test_handwriting_and_photograph_are_those_of_scikit_learn_without_its_import(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)  # not importable
    ink, labels = scanners.handwriting()
    photograph = background()
    monkeypatch.undo()
    digits, image = load_digits(), load_sample_image("china.jpg")
    np.testing.assert_array_equal(ink * 16, digits.images)
    np.testing.assert_array_equal(labels, digits.target)
    assert photograph.shape == (image.shape[0] // 4, image.shape[1] // 4, 3)
    np.testing.assert_allclose(photograph[0, 0], image[:4, :4].mean((0, 1)), atol=0.5 + 1e-6)


def test_where_its_files_lie_elsewhere_scikit_learn_is_asked(monkeypatch):
    expected = (*scanners.handwriting(), background())
    monkeypatch.setattr(scanners, "_packaged", lambda name: None)
    for ours, theirs in zip((*scanners.handwriting(), background()), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_samples_stand_side_by_side_with_room_for_those_that_are_missing():
    grey = np.array([[[[3], [5]]], [[[9], [9]]]], np.uint8)
    wide = _in_a_row(grey, 3)
    expected = [[0, 1, np.nan, 0, 0, np.nan, np.nan, np.nan]]  # an even image is black
    np.testing.assert_array_equal(wide, expected)
    colours = np.arange(12, dtype=np.uint8).reshape(2, 1, 2, 3)
    wide = _in_a_row(colours, 2)
    np.testing.assert_array_equal(wide[:, [0, 1, 3, 4]].reshape(-1), np.arange(12))
    assert (wide[:, 2] == 255).all()


@pytest.mark.slow
def test_a_program_for_one_run_gives_the_bits_of_any_other(optimized):
    def init(key):
        return models.SmallCNN(widths=(16,)).init(key, jnp.zeros((2, 8, 8, 3)))

    key = jax.random.key(0)
    quick = for_one_run(init)
    jax.tree.map(np.testing.assert_array_equal, quick(key), jax.jit(init)(key))
    # What only asks for the form of the result traces it inside another program.
    assert jax.eval_shape(quick, key) == jax.eval_shape(init, key)


@pytest.mark.parametrize(("platform", "least"), [("cpu", True), ("tpu", False)])
def test_a_program_for_one_run_is_optimized_less_on_cpu_alone(
    platform, least, optimized, monkeypatch
):
    given = []
    monkeypatch.setattr(jax, "jit", lambda function, **options: given.append(options))
    with traced_for(platform):
        for_one_run(jnp.sin, donate_argnums=0)
    expected = {"compiler_options": {"xla_backend_optimization_level": 1}} if least else {}
    assert given == [expected | {"donate_argnums": 0}]


@pytest.mark.parametrize(("platform", "least"), [("cpu", True), ("tpu", False)])
def test_a_runs_program_is_optimized_less_on_cpu_alone(platform, least, optimized):
    given = []

    class Program:
        def compile(self, compiler_options):
            given.append(compiler_options)

    with traced_for(platform):
        compile_quickly(Program())
    assert given == [{"xla_backend_optimization_level": 1} if least else None]


def test_what_is_compiled_for_a_run_gives_what_it_gives_elsewhere(optimized):
    x = jnp.linspace(0.1, 2, 1000)
    program = jax.jit(lambda x: jnp.sin(x) @ jnp.log(x))
    np.testing.assert_allclose(compile_quickly(program.lower(x))(x), program(x), rtol=1e-5)
