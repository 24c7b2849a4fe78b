"""Python without assertions (`python -O`), inside one of which flax removes its interceptors."""

import json
import subprocess
import sys

PROGRAM = """
import json
import flax.linen as nn
import numpy as np
import optax
from fedjax_bn.methods import fedbn
from fedjax_bn.simulation import simulate

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=True)(nn.Dense(3)(x)))

def samples(seed):
    random = np.random.default_rng(seed)
    labels = np.arange(27) % 2
    return np.float32(random.normal(size=(27, 4)) + labels[:, None] * seed), labels

result = simulate(
    fedbn(Net(), optax.sgd(0.1)),
    clients={"a": samples(1), "b": samples(2)},
    unseen={"c": samples(3)},
    adaptations=("running", "tsmobn"),
    rounds=2,
    batch_size=8,
    eval_every=1,
    show_progress=False,
)
print(json.dumps([result.accuracy, [record["loss"] for record in result.history]]))
"""


def test_python_without_assertions_gives_the_same_losses_and_accuracies(capsys):
    command = [sys.executable, "-O", "-c", PROGRAM]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    exec(PROGRAM, {"__name__": "program"})
    assert json.loads(result.stdout) == json.loads(capsys.readouterr().out)
