"""Strict settings for every test: two virtual devices, strict promotion, warnings are errors."""

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("MPLBACKEND", "Agg")
# One folder for all workers, which the process that starts them removes: not the user's.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Tests of sweeps have launch/sweeps on their path, whose coverage.py is not the package.
if importlib.util.find_spec("coverage") is None:
    sys.modules["coverage"] = None
# Nearly all of the suite's time is compilation of tiny programs; `make test-slow` optimizes.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and "XLA_FLAGS" not in os.environ:
    # The first halves what is left, the second spares another tenth.
    wanted = ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    attempt = [sys.executable, "-c", "import jax; jax.devices()"]
    # XLA ends a process that asks for a flag that this version does not know.
    for chosen in (wanted, wanted[:1], wanted[1:]):
        flags = {"XLA_FLAGS": " ".join(chosen)}
        if subprocess.run(attempt, env=os.environ | flags, capture_output=True).returncode == 0:
            os.environ.update(flags)
            break

import hypothesis
import jax
import pytest

if not hasattr(jax, "enable_x64"):  # the oldest versions that we support
    from jax.experimental import enable_x64

    jax.enable_x64 = enable_x64
jax.config.update("jax_numpy_dtype_promotion", "strict")
hypothesis.settings.register_profile("suite", deadline=None)  # machines differ
hypothesis.settings.load_profile("suite")
gc.set_threshold(100_000, 50, 50)  # a collection visits all that JAX remembers of every program


def _megabytes() -> float:
    """What this process holds in memory; 0 where nobody says."""
    path = Path("/proc/self/statm")
    pages = int(path.read_text().split()[1]) if path.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _forget() -> None:
    """Gives back what compiled programs hold."""
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc gives nothing back by itself
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True, scope="module")
def forgotten():
    """Forgets a module's compiled programs where they have come to much."""
    yield
    if _megabytes() > 2200:
        _forget()


@pytest.fixture(scope="module")
def spacious():
    """A module that needs gigabytes begins with none of another's."""
    _forget()


@pytest.fixture
def x64():
    """Runs one test in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def optimized():
    """Optimizes the programs of one test, where they run longer than they compile."""
    usually = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", usually)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and reference values; skips where it is absent."""
    folder = Path(os.environ.get("FEDJAX_BN_SHARED", "../shared")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}: set FEDJAX_BN_SHARED to its folder")
    return folder
