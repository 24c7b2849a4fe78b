"""What a start spares: data, compilations, and programs kept between runs."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from sklearn.datasets import load_digits, load_sample_image

from fedjax_bn import models
from fedjax_bn.data.sets import scanners
from fedjax_bn.engine.backend import for_one_run
from fedjax_bn.training.programs import keep_compiled


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


SETTINGS = {
    "jax_compilation_cache_dir": None,
    "jax_compilation_cache_max_size": -1,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_enable_compilation_cache": True,
}
HIT, MISS = (f"/jax/compilation_cache/cache_{what}" for what in ("hits", "misses"))


@pytest.fixture
def events(monkeypatch):
    """Turns the cache on for one test and keeps every program; lists hits and misses."""
    for name in [name for name in os.environ if name.startswith(("JAX_COMPIL", "JAX_PERSIST"))]:
        monkeypatch.delenv(name)  # the suite's own
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    before, seen = {name: getattr(jax.config, name) for name in SETTINGS}, []
    # The oldest JAX cannot take it back.
    jax.monitoring.register_event_listener(
        lambda event, **rest: seen.append(event) if event in (HIT, MISS) else None
    )
    for settings in (SETTINGS, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        reset_cache()
        if settings is SETTINGS:
            yield seen


def compile_and_run() -> float:
    """Compiles a program again and runs it."""
    return float(jax.jit(lambda x: jnp.sin(x).sum())(np.arange(7, dtype=np.float32)))


def test_a_kept_program_is_found_again_and_a_half_written_one_is_dropped(tmp_path, events):
    fresh = compile_and_run()  # nothing is kept yet
    assert not events
    keep_compiled(str(tmp_path))
    assert [compile_and_run() for _ in range(2)] == [fresh] * 2
    assert events == [MISS, HIT]

    for path in tmp_path.glob("*-cache"):  # killed while it wrote: JAX writes the time afterwards
        path.write_bytes(path.read_bytes()[:100])
        path.with_name(path.name.replace("-cache", "-atime")).unlink()
    (tmp_path / "gone-atime").write_bytes(bytes(8))  # killed while it removed
    (tmp_path / "a user's file").touch()
    keep_compiled(str(tmp_path))
    assert set(os.listdir(tmp_path)) - {".lockfile"} == {"a user's file"}
    events.clear()
    assert compile_and_run() == fresh
    assert events == [MISS]
