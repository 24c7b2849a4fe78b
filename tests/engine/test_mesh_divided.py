"""Clients over devices and each batch over devices too, in a process of its own that has four."""

import os
import subprocess
import sys

import pytest

import runs

# Large enough that XLA exchanges parts of maps between all devices, not a client's own alone.
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh
from fedjax_bn.data.drawing import drawing
from fedjax_bn.data.pixels.images import standardize
from fedjax_bn.federation import client_variables
from fedjax_bn.methods import fedbn
from fedjax_bn.models import SmallCNN

key, model = jax.random.key(0), SmallCNN(widths=(4, 4, 4))
images = np.random.default_rng(0).integers(0, 256, (5, 32, 28, 28, 3), dtype=np.uint8)
batches = drawing([(one, np.arange(32) % 10) for one in images], batch_size=32)(key)
batches |= {"participates": jnp.arange(5) != 4}
start = model.init(key, jnp.zeros((1, 28, 28, 3)))
prepare = standardize((0.5,) * 3, (0.5,) * 3)
found = []
for mesh in (None, Mesh(np.array(jax.devices()).reshape(2, 2), ("clients", "batch"))):
    method = fedbn(model, optax.sgd(0.1), mesh=mesh, prepare=prepare)
    state, metrics = method.round(method.init(key, start, 5), batches, key)
    found.append(jax.tree.map(np.asarray, (client_variables(state), state.shared, metrics)))
for one, four in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(four, one, rtol=1e-3, atol=1e-4)
print("the same")
"""


@pytest.mark.slow
def test_clients_that_sit_out_and_rows_that_fill_up_hold_nobody_up():
    # Two devices train three clients, the others one: the second sits out, the third fills up.
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=runs.ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(runs.ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.stdout == "the same\n", told.stderr[-2000:]
