"""Clients over a mesh of devices: the numbers of one device, and one reduction."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import runs
from cohorts import KEY, NAMES, OPTIONS
from federations import ON_MAPS, MapNet, assert_close, batches_of, in_float64, variables_of
from fedjax_bn import methods
from fedjax_bn.state import client_variables, put_rows, take_rows

DEVICES = np.array(jax.devices())
OVER_CLIENTS, OVER_BATCH = Mesh(DEVICES, ("clients",)), Mesh(DEVICES[None], ("clients", "batch"))
SIZES = (9, 4, 6)
# What a collective gives and its kind, in the text of a compiled program.
COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


@functools.cache
def method_of(name, mesh=None):
    make = getattr(methods, name.partition(",")[0])
    options = {"clients": "map", "local_epochs": 2, "mesh": mesh}
    options |= OPTIONS.get(name, {}) | ON_MAPS.get(name, {})
    return make(MapNet(), optax.sgd(0.01, momentum=0.5), **options)


def batches_for(sizes, batch=4):
    """The second client sits out."""
    present = jnp.asarray([True, False, True, True])[: len(sizes)]
    return batches_of(sizes, epochs=2, batch=batch) | {"participates": present}


def start(method, num_clients):
    return method.init(KEY, in_float64(variables_of(MapNet())), num_clients)


def after(name, batches, mesh=None, rounds=1):
    method = method_of(name, mesh)
    state = start(method, len(batches["valid"]))
    for _ in range(rounds):
        state, metrics = method.round(state, batches, KEY)
    clients = client_variables(state)
    return state._replace(personal=(), memory=()), clients, metrics


# A rule that remembers, and a message; devices see nothing else of the other methods.
OFTEN = ("fedbn, remembering", "scaffold")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in NAMES]
)
def test_clients_over_devices_give_the_numbers_of_one_in_one_reduction(x64, name):
    """Two rounds of one program, in which nothing but what is shared is reduced, and numbers."""
    batches = batches_for((9, 4, 6, 5))
    method, over = method_of(name, OVER_CLIENTS), PartitionSpec("clients")
    state = start(method, 4)
    given = jax.device_put(batches, NamedSharding(OVER_CLIENTS, over))
    round = method.round.lower(state, given, KEY).compile()

    found = COLLECTIVE.findall(round.as_text())
    assert {kind for _, kind in found} == {"all-reduce"}
    *small, large = sorted(numbers_of(form) for form, _ in found)
    # A weight, a loss or a risk of each of the four clients.
    if name != "csac":  # which weighs each leaf, and so gathers all uploads first
        assert all(size <= 3 * 4 for size in small)
    shared = sum(leaf.size for leaf in jax.tree.leaves(state.shared))
    assert large > shared

    for _ in range(2):
        state, metrics = round(state, given, KEY)
    spread = (state._replace(personal=(), memory=()), client_variables(state), metrics)
    assert_close(spread, after(name, batches, rounds=2), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedbn, by risks", "scaffold", "csac"])
def test_clients_need_not_go_out_even(x64, name):
    """Three clients on two devices: a row of padding counts nowhere."""
    batches = batches_for(SIZES)
    spread = after(name, batches, OVER_CLIENTS, rounds=2)
    assert_close(spread, after(name, batches, rounds=2), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["fedcd", "fedbn", "fedig", "perfedavg"],
)
def test_a_batch_over_devices_gives_the_numbers_of_one_device(x64, name):
    """Statistics, losses and gradients of both orders; batches of three on two devices."""
    batches = batches_for((5, 3), batch=3)
    split = after(name, batches, OVER_BATCH)
    assert_close(split, after(name, batches), rtol=1e-10, atol=1e-12)


def numbers_of(given):
    """How many numbers the shapes in a text have, such as 11 for (f32[], f32[2,5]{1,0})."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", given)
    return sum(int(np.prod([int(side) for side in shape.split(",") if side])) for shape in shapes)


@pytest.mark.slow
def test_a_cohort_on_a_mesh_is_that_of_one_device(x64):
    """Three of four clients on two devices."""
    client, states = jnp.asarray([3, 0, 2], jnp.int32), []
    batches = batches_of(SIZES, epochs=2) | {"client": client}
    batches |= {"population": jnp.asarray(4, jnp.int32)}
    for mesh in (None, OVER_CLIENTS):
        method = method_of("scaffold", mesh)
        state = start(method, 4)
        cohort, _ = method.round(take_rows(state, client), batches, KEY)
        states.append(put_rows(state, cohort, client))
    assert_close(states[1], states[0], rtol=1e-10, atol=1e-12)


def test_a_mesh_made_by_jax_is_taken_and_one_without_clients_refused():
    method_of("fedavg", jax.make_mesh((2,), ("clients",)))
    with pytest.raises(ValueError, match=r"the mesh has the axes x, .*make_mesh\(\(n,\)"):
        method_of("fedavg", Mesh(DEVICES, ("x",)))


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
