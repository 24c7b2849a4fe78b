"""Python without assertions (`python -O`), inside one of which flax removes its interceptors."""

import json
import subprocess
import sys

import numpy as np

X = [[1.0, -2.0], [0.5, 4.0], [3.0, 1.0]]
PROGRAM = f"""
import flax.linen as nn
import jax
import jax.numpy as jnp
from fedjax_bn.adaptation import batch, running

model, ones, zeros = nn.BatchNorm(use_running_average=True), jnp.ones(2), jnp.zeros(2)
params, statistics = {{"scale": ones, "bias": zeros}}, {{"mean": zeros, "var": ones}}
variables, x = {{"params": params, "batch_stats": statistics}}, jnp.asarray({X})
predicts = [jax.jit(make(model).predict) for make in (batch, running, batch)]
print([predict(variables, (), x)[0].tolist() for predict in predicts])
"""


def test_python_without_assertions_applies_each_rule_in_its_own_passes():
    command = [sys.executable, "-O", "-c", PROGRAM]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    x = np.array(X)
    by_batch, by_running = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), x / np.sqrt(1 + 1e-5)
    expected = [by_batch, by_running, by_batch]
    np.testing.assert_allclose(json.loads(result.stdout), expected, rtol=1e-5, atol=1e-6)
