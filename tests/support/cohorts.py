"""Methods on a tiny network of maps, and the batches of a cohort with padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from federations import ON_MAPS, MapNet, batches_of, with_value
from fedjax_bn.aggregation import Weighing, risk_extrapolation
from method_table import METHODS

KEY = jax.random.key(3)
SIZES = (9, 4, 6, 5)
EVERYBODY, PRESENT = jnp.ones(4, bool), jnp.asarray([True, False, True, True])
SGD = optax.sgd(0.1, momentum=0.5)


def remembering():
    """Weights by size over the mean of all risks so far: mixed-up rows would show."""

    def init(num_clients):
        return {"total": jnp.zeros(num_clients), "count": jnp.zeros(num_clients)}

    def weigh(state, sizes, risks, messages):
        counted = (sizes > 0).astype(risks.dtype)
        state = {"total": state["total"] + risks, "count": state["count"] + counted}
        mean = state["total"] / jnp.maximum(state["count"], 1)
        return sizes.astype(risks.dtype) / jnp.maximum(mean, 1e-3), state

    return Weighing(init, weigh)


OPTIONS = {
    "fedbn, by risks": {"weigh": risk_extrapolation(0.8)},
    "fedbn, remembering": {"weigh": remembering(), "keep_optimizer": True},
}
# But FedWon, which is FedAvg of networks without batch norm.
NAMES = [name for name in [*METHODS, *OPTIONS] if name != "fedwon"]


@functools.cache
def method_of(name, clients="map"):
    make = METHODS[name.partition(",")[0]]
    options = OPTIONS.get(name, {}) | ON_MAPS.get(name, {})
    return make(MapNet(), SGD, clients=clients, local_epochs=2, **options)


def unequal_batches(present=EVERYBODY):
    """Two local epochs, of which the third client makes one; all rows, in the form of a cohort."""
    batches = batches_of(SIZES, epochs=2)
    half = batches["valid"].shape[1] // 2
    everyone = {"client": jnp.arange(4, dtype=jnp.int32), "population": jnp.asarray(4, jnp.int32)}
    batches = with_value(batches, (2, slice(half, None)), False, "valid")
    return batches | {"participates": present} | everyone


def rows_of(batches, client):
    """The batches of a cohort: rows from 4 on are padding."""
    population, client = batches["population"], np.asarray(client, np.int32)
    rest = {name: leaf for name, leaf in batches.items() if name != "population"}
    rows = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[np.minimum(client, 3)]), rest)
    return rows | {
        "participates": rows["participates"] & (client < 4),
        "client": jnp.asarray(client),
        "population": population,
    }
