"""Kernels chosen by what was measured: once, kept, recorded, and the same from then on."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.models.cpu import convolve, in_cache, measure
from fedjax_bn.models.cpu.algorithms import ALGORITHMS, UNIT_STRIDES
from fedjax_bn.models.cpu.choice import Shapes, by_table, choosing, chosen, differentiated_twice
from fedjax_bn.run import kernels as run_kernels
from fedjax_bn.run.config import base
from fedjax_bn.run.errors import ConfigError, WorkdirError
from fedjax_bn.run.kernels import as_recorded, kept_in, kernels

PADDING = ((1, 1), (1, 1))
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 8)), jnp.float32)
KERNEL = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 8, 8)), jnp.float32)
SHAPES = Shapes(X.shape, KERNEL.shape, (1, 1), PADDING)


def convolved(x, kernel=KERNEL):
    return convolve(x, kernel, (1, 1), PADDING)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of compiled programs, and how often something was measured."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    calls = []

    def measured(shapes):
        calls.append(str(shapes))
        return {"patches": [2.0] * 5, "taps": [1.0] * 5}

    monkeypatch.setattr(run_kernels, "measured", measured)
    yield calls
    jax.config.update("jax_compilation_cache_dir", before)


def started(workdir, said=None):
    """The context of a run that measures."""
    workdir.mkdir(exist_ok=True)
    config = base()
    config.cpu_kernels = "measured"
    return kernels(config, workdir, (said if said is not None else []).append)


def recorded(workdir):
    return json.loads((workdir / "kernels.json").read_text())


@pytest.mark.parametrize(
    ("taps", "patches", "taken"),
    [
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], "taps"),
        ([1.0, 1.0, 1.0], [1.1, 1.1, 1.1], "patches"),  # too little is gained
        ([2.0, 2.0, 0.5], [2.0, 2.0, 2.0], "patches"),  # once, by chance
        ([1.0, 1.0, 1.0], [2.0, 2.0, 1.0], "patches"),  # others were at work
        ([5.0], [2.0, 2.0, 2.0], "patches"),  # it was far behind at once
    ],
)
def test_another_algorithm_is_taken_where_it_is_clearly_faster(taps, patches, taken):
    assert measure.fastest({"patches": patches, "taps": taps}, "patches") == taken


def test_what_was_not_measured_is_the_usual():
    assert measure.fastest({}, "direct") == "direct"


@pytest.mark.parametrize(
    ("shapes", "without"),
    [
        (Shapes((4, 2, 2, 64), (3, 3, 64, 64), (1, 1), PADDING), {"direct"}),
        (Shapes((4, 8, 8, 64), (3, 3, 64, 64), (2, 2), PADDING), {*UNIT_STRIDES}),
        (Shapes((4, 64, 64, 64), (3, 3, 64, 64), (1, 1), PADDING), {"transformed", "taps"}),
        (Shapes((4, 16, 16, 64), (5, 5, 64, 64), (1, 1), ((2, 2), (2, 2))), {"fast_fourier"}),
        (Shapes((4, 16, 16, 64), (7, 7, 64, 64), (1, 1), ((3, 3), (3, 3))), {"tiled"}),
    ],
)
def test_no_algorithm_is_timed_that_cannot_be_the_fastest(shapes, without):
    names = measure.candidates(shapes)
    assert by_table(shapes) in names
    assert not without & {*names}
    assert {*names} <= {*ALGORITHMS}


def test_a_product_of_single_pixels_is_never_measured():
    assert measure.measured(Shapes((4, 8, 8, 64), (1, 1, 64, 64), (1, 1), ((0, 0),) * 2)) == {}


def test_all_candidates_are_timed_while_a_program_is_traced():
    found = {}

    def rule(shapes):
        found[shapes] = measure.measured(shapes)
        return "patches"

    with choosing(rule):
        jax.eval_shape(jax.jit(lambda x: jax.lax.map(jax.vmap(convolved), x)), X[None, None])
    ((shapes, times),) = found.items()
    assert shapes == SHAPES
    assert {*times} == {*measure.candidates(SHAPES)}
    assert all(0 < second < 10 for seconds in times.values() for second in seconds)


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


def test_a_choice_is_measured_once_said_kept_and_recorded(folder, tmp_path):
    said = []
    for name in ("first", "second"):
        with started(tmp_path / name, said):
            jax.eval_shape(lambda x: convolved(convolved(x)), X)
    assert folder == [str(SHAPES)]
    assert len(said) == 1
    assert recorded(tmp_path / "first") == recorded(tmp_path / "second") == {str(SHAPES): "taps"}


def test_a_run_goes_on_with_what_it_took(folder, tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "kernels.json").write_text(json.dumps({str(SHAPES): "direct"}))
    for context in (started(workdir), as_recorded(workdir)):
        with context:
            text = str(jax.make_jaxpr(lambda x: convolved(x))(X))  # traced anew
        assert "conv_general_dilated" in text
    assert not folder


def test_a_damaged_file_is_measured_anew(folder, tmp_path):
    file = kept_in(tmp_path / "compiled")
    for count, damage in enumerate(("", "{", "[]", json.dumps({str(SHAPES): {"algorithm": "x"}}))):
        file.parent.mkdir(exist_ok=True)
        file.write_text(damage)
        with started(tmp_path / str(count)):
            jax.eval_shape(convolved, X)
        assert len(folder) == count + 1
        assert json.loads(file.read_text())[str(SHAPES)]["algorithm"] == "taps"


def test_of_two_that_measure_at_once_the_first_decides(folder, tmp_path, monkeypatch):
    file = kept_in(tmp_path / "compiled")
    slow = run_kernels.measured

    def overtaken(shapes):
        file.parent.mkdir()
        file.write_text(json.dumps({str(shapes): {"algorithm": "tiled"}}))
        return slow(shapes)

    monkeypatch.setattr(run_kernels, "measured", overtaken)
    with started(tmp_path / "run"):
        jax.eval_shape(convolved, X)
    assert recorded(tmp_path / "run") == {str(SHAPES): "tiled"}


def test_several_processes_take_what_is_kept_and_measure_nothing(folder, tmp_path, monkeypatch):
    file = kept_in(tmp_path / "compiled")
    file.parent.mkdir()
    file.write_text(json.dumps({str(SHAPES): {"algorithm": "direct"}}))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with started(tmp_path / "run"):
        known = str(jax.make_jaxpr(lambda x: convolved(x))(X))
        jax.eval_shape(convolved, X[:1])
    assert "conv_general_dilated" in known
    assert recorded(tmp_path / "run") == {str(SHAPES): "direct"}
    assert not folder


@pytest.mark.parametrize(
    ("name", "strides", "says"),
    [("fast", (1, 1), "must be one of direct"), ("tiled", (2, 2), "other strides than 1")],
)
def test_a_rule_that_names_what_cannot_be_is_refused(name, strides, says):
    with choosing(lambda shapes: name), pytest.raises(ValueError, match=says):
        convolve(X, KERNEL, strides, PADDING)


def test_a_damaged_record_is_refused(folder, tmp_path):
    (tmp_path / "kernels.json").write_text('{"a": "fast"}')
    with pytest.raises(WorkdirError, match=r"kernels.json names 'fast', but there are direct"):
        started(tmp_path)


def test_without_a_folder_for_them_nothing_is_measured(folder, tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)
    with pytest.raises(ConfigError, match=r"set config.compilation_cache to a local folder"):
        started(tmp_path)


def test_gradients_that_are_differentiated_take_matrix_products_where_these_fit_in_memory():
    stem = Shapes((16, 64, 64, 3), (7, 7, 3, 64), (2, 2), ((3, 3), (3, 3)))
    huge = stem._replace(images=(1024, 224, 224, 3))
    with differentiated_twice():
        assert chosen(stem) is ALGORITHMS["patches"]
        assert chosen(huge) is ALGORITHMS["direct"]
    assert chosen(stem) is ALGORITHMS["direct"]
