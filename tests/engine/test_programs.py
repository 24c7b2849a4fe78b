"""Programs that need a JAX that has not started: its devices, and the memory of a round."""

import os
import platform
import subprocess
import sys

import pytest

from tests.support import runs

MEMORY = """
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
new = []
for _ in range(5):  # a thread's heap grows the first time
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    compiled(*inputs).block_until_ready()
    new.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(new))
"""


WEIGHTS = """
import jax
from fedjax_bn.run.config import base
from fedjax_bn.run.experiment.method import WEIGHING, method_maker

config = base()
for name in WEIGHING:
    config.weigh = name
    method_maker(config)
jax.config.update("jax_num_cpu_devices", 3)  # RuntimeError if JAX has started
print("not started")
"""


def printed(program: str) -> str:
    """What a program prints in a process without the settings of the tests."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(runs.ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_no_rule_of_weights_starts_jax_before_its_devices_are_chosen():
    assert printed(WEIGHTS) == "not started\n"


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc keeps freed memory")
def test_temporaries_are_not_new_pages_in_every_round():
    assert int(printed(MEMORY)) < 1000
