"""Rounds compiled for a TPU of four chips, without one: memory, and what the chips exchange."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from collectives import collectives, over_rows, with_host
from federations import NAMED
from fedjax_bn import models
from fedjax_bn.engine.backend import traced_for
from fedjax_bn.task import segmentation
from method_table import METHODS
from tpu import MEMORY, needs_libtpu, on_chips, shapes_on

pytestmark = [pytest.mark.slow, needs_libtpu]
CLIENTS, STEPS, BATCH = 4, 2, 4
TWICE = ("csac", "fedcd")  # clients' weights depend on the uploads of others


def compiled_round(name, mesh, *, segments=False):
    """One round of a method on a small network with batch norm, compiled for the chips."""
    norm, options = "none" if name == "fedwon" else "batch", NAMED.get(name, {})
    network = models.SmallCNN(3, widths=(4, 4), norm=norm)
    image = jax.ShapeDtypeStruct((CLIENTS, STEPS, BATCH, 8, 8, 3), jnp.float32)
    label = jax.ShapeDtypeStruct(image.shape[:3], jnp.int32)
    batches = {"image": image, "label": label, "valid": jax.ShapeDtypeStruct(label.shape, bool)}
    if segments:
        network = models.UNet(3, width=4, levels=1, norm=norm)
        options = options | {"task": segmentation(3), "clients": "map"}
        batches["label"] = {"mask": jax.ShapeDtypeStruct(image.shape[:-1], jnp.uint8)}
    make = functools.partial(METHODS[name], network, optax.sgd(0.1, momentum=0.5), **options)
    key = jax.eval_shape(jax.random.key, 0)
    on_all, by_client = (NamedSharding(mesh, PartitionSpec(*over)) for over in ((), ("clients",)))
    with traced_for("tpu"):
        variables = jax.eval_shape(network.init, key, jax.eval_shape(lambda x: x[0, 0], image))
        # Without the mesh, because `init` places arrays and these chips can hold none.
        state = jax.eval_shape(functools.partial(make().init, num_clients=CLIENTS), key, variables)
        own = shapes_on(by_client, (state.personal, state.memory))
        state = shapes_on(on_all, state)._replace(personal=own[0], memory=own[1])
        given = state, shapes_on(by_client, batches), shapes_on(on_all, key)
        return make(mesh=mesh).round.lower(*given).compile()


CASES = [*((name, False) for name in METHODS), ("fedbn", True), ("feddg", True)]


@pytest.mark.parametrize(("name", "segments"), CASES)
def test_a_round_over_four_chips_fits_and_has_one_reduction(name, segments):
    program = compiled_round(name, on_chips(4), segments=segments)
    memory = program.memory_analysis()
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    assert 0 < arguments + outputs + memory.temp_size_in_bytes < MEMORY
    found = collectives(program.as_text(), devices=4)
    assert [one.kind for one in found] == ["all-reduce"] * (1 + (name in TWICE))
    assert not with_host(program.as_text())


@pytest.mark.parametrize("name", ["fedbn", "fedcd"])
def test_a_round_with_divided_batches_has_one_reduction_over_clients(name):
    """Two chips divide a client's batch: what XLA inserts there remains between the two."""
    program = compiled_round(name, on_chips(2, 2, axes=("clients", "batch")))
    found = collectives(program.as_text(), devices=4)
    among_clients = over_rows(found, row=2)
    assert [one.kind for one in among_clients] == ["all-reduce"] * (1 + (name in TWICE))
    assert len(found) > len(among_clients)
