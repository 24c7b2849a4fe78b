"""The temporaries of a compiled round."""

import os
import platform
import subprocess
import sys

import pytest

from tests.support import runs

PROGRAM = """
import resource
from fedjax_bn.training.mesh import divide_cpu
divide_cpu(2, 0, 2)
import jax, jax.numpy as jnp, numpy as np
from fedjax_bn.engine.programs import compile_round

def loss(w, x):
    for _ in range(24):  # a map of 4 MiB each, which the gradient needs again
        x = jnp.tanh(x @ w)
    return jnp.square(x).sum()

inputs = jnp.eye(64) + 0.1, jnp.ones((2**14, 64))
gradient = jax.jit(jax.grad(loss))
expected, compiled = gradient(*inputs), compile_round(gradient.trace(*inputs))
assert compiled.memory_analysis().temp_size_in_bytes > 2**26
np.testing.assert_array_equal(compiled(*inputs), expected)
compiled(*inputs).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
compiled(*inputs).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc keeps freed memory")
def test_temporaries_are_not_new_pages_in_every_round():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(runs.ROOT)}
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert int(done.stdout) < 1000, done.stderr[-2000:]
