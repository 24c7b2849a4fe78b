"""Clients over a mesh of devices: the numbers of one device, and one reduction."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import cohorts
import runs
from cohorts import KEY
from collectives import collectives
from federations import ON_MAPS, MapNet, assert_close, batches_of, in_float64, variables_of
from fedjax_bn.engine.devices import on_each_device
from fedjax_bn.state import client_variables
from method_table import METHODS

DEVICES = np.array(jax.devices())
OVER_CLIENTS, OVER_BATCH = Mesh(DEVICES, ("clients",)), Mesh(DEVICES[None], ("clients", "batch"))


def by_roots(sizes, risks):
    """A rule whose weights are known before training, by the sizes of all clients."""
    roots = jnp.sqrt(sizes.astype(jnp.result_type(float)))
    return roots / roots.sum()


OPTIONS = cohorts.OPTIONS | {"fedbn, by roots": {"weigh": by_roots}}
# Weights that depend on other clients' sizes, risks or uploads are known after a first reduction.
TWICE = {"csac", "fedawa", "fedcd", "fedlws", *OPTIONS}


def begin(name, sizes, mesh=None, batch=4):
    """A method, its first state, and batches in which the second client sits out."""
    make = METHODS[name.partition(",")[0]]
    options = {"clients": "map", "local_epochs": 2, "mesh": mesh}
    options |= OPTIONS.get(name, {}) | ON_MAPS.get(name, {})
    method = make(MapNet(), optax.sgd(0.01, momentum=0.5), **options)
    present = jnp.asarray([True, False, True, True])[: len(sizes)]
    batches = batches_of(sizes, epochs=2, batch=batch) | {"participates": present}
    return method, method.init(KEY, in_float64(variables_of(MapNet())), len(sizes)), batches


def after(round, state, batches, rounds):
    """What is common, all clients' models, and the last metrics."""
    for _ in range(rounds):
        state, metrics = round(state, batches, KEY)
    return state._replace(personal=(), memory=()), client_variables(state), metrics


# A rule with a memory, and a message; devices see nothing else of other methods.
OFTEN = ("fedbn, remembering", "scaffold")
NAMES = dict.fromkeys([*cohorts.NAMES, *OPTIONS])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in NAMES]
)
def test_clients_over_devices_give_the_numbers_of_one_in_one_reduction(x64, name):
    """Two rounds of one program, in which nothing but what is shared is reduced, and numbers."""
    method, state, batches = begin(name, (9, 4, 6, 5), OVER_CLIENTS)
    spread = jax.device_put(batches, NamedSharding(OVER_CLIENTS, PartitionSpec("clients")))
    round = method.round.lower(state, spread, KEY).compile()

    kinds, numbers = zip(*collectives(round.as_text()), strict=True)
    assert kinds == ("all-reduce",) * (1 + (name in TWICE))
    *small, large = sorted(numbers)
    # Two halves of a size, a risk and two booleans of each of the four clients.
    if name not in ("csac", "fedawa", "fedlws"):  # which read, and so gather, all uploads first
        assert all(number <= 5 * 4 for number in small)
    shared = sum(leaf.size for leaf in jax.tree.leaves(state.shared))
    assert large > shared

    on_two = after(round, state, spread, 2)
    alone, state, _ = begin(name, (9, 4, 6, 5))
    assert_close(on_two, after(alone.round, state, batches, 2), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedcd", "fedbn", "fedig", "perfedavg"])
def test_a_batch_over_devices_gives_the_numbers_of_one_device(x64, name):
    """Statistics, losses and gradients of both orders; batches of three on two devices."""
    ends = []
    for mesh in (None, OVER_BATCH):
        method, state, batches = begin(name, (5, 3), mesh, batch=3)
        ends.append(after(method.round, state, batches, 1))
    assert_close(*ends, rtol=1e-10, atol=1e-12)


def test_rows_of_all_dtypes_meet_in_one_reduction_and_keep_their_values():
    """Integers too long for a float32, and the least and the greatest of each dtype."""
    rows = {"bool": jnp.asarray([True, False])}
    for dtype in ("float16", "bfloat16", "float32"):
        rows[dtype] = jnp.asarray([jnp.finfo(dtype).max, -jnp.inf], dtype)
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
        limits = jnp.iinfo(dtype)
        values = [[limits.min, limits.max], [limits.max // 3, limits.max - 1]]
        rows[dtype] = jnp.asarray(np.array(values, dtype))

    def meet(meeting, common, rows):
        return meeting.together(common, rows), rows

    met = jax.jit(on_each_device(meet, OVER_CLIENTS)).lower((), rows).compile()
    (_, found), _ = met((), rows)
    jax.tree.map(np.testing.assert_array_equal, found, rows)
    assert {name: x.dtype for name, x in found.items()} == {n: x.dtype for n, x in rows.items()}
    assert [kind for kind, _ in collectives(met.as_text())] == ["all-reduce"]


# Large enough that XLA exchanges parts of maps between all devices, not a client's own alone.
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh
from fedjax_bn.data.sampling import drawing
from fedjax_bn.engine.images import standardize
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
    state = method.init(key, start, 5)
    state, metrics = method.round(state, batches, key)
    found.append(jax.tree.map(np.asarray, (client_variables(state), state.shared, metrics)))
for one, four in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(four, one, rtol=1e-3, atol=1e-4)
print("the same")
"""


@pytest.mark.slow
def test_clients_that_sit_out_and_rows_that_fill_up_hold_no_device_up():
    # Two devices train three clients, the others one: the second sits out, the third fills up.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=runs.ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(runs.ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "the same\n", done.stderr[-2000:]
