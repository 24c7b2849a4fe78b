"""Python without assertions (`python -O`), inside one of which flax removes its interceptors."""

import subprocess
import sys

PROGRAM = """
import flax.linen as nn
import jax
from fedjax_bn.adaptation import batch, running

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True)(x)

x = jax.random.normal(jax.random.key(0), (5, 2))
variables = Net().init(jax.random.key(0), x)
for make in (batch, running, batch):
    print(make(Net()).predict(variables, (), x)[0].tolist())
"""


def test_python_without_assertions_applies_each_rule_in_its_own_passes(capsys):
    command = [sys.executable, "-O", "-c", PROGRAM]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    exec(PROGRAM, {"__name__": "program"})
    assert result.stdout == capsys.readouterr().out
    by_batch, by_running, again = result.stdout.splitlines()
    assert by_batch == again != by_running
