"""Checks before anything is computed, on shapes alone: a state fits in memory, a round works."""

import math
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_bn.arguments.choices import naming
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.sampling import label_forms
from fedjax_bn.engine.backend import on_cpu
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.devices import padded
from fedjax_bn.federation import FederatedState, broadcast_of, own_of
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.build import Experiment, sampler
from fedjax_bn.run.experiment.method import what_validates

_Form = jax.ShapeDtypeStruct


def check_shapes(
    config: ConfigDict, experiment: Experiment, start: Callable[[], FederatedState]
) -> None:
    """Traces the first state, a client's round and the server's step; nothing is compiled.

    Raises:
      ConfigError: the state is larger than this machine's memory.
      ValueError: model, method and what they are given do not suit each other.
    """
    with naming(f"config.method={brief(config.method)} on config.model={brief(config.model)}"):
        state = jax.eval_shape(start)
        _check_memory(config, state, experiment.mesh)
        method = experiment.method
        own = jax.eval_shape(lambda state: own_of(state, 0), state)
        key = jax.eval_shape(jax.random.key, 0)
        batches = batches_of_one(config, experiment)
        _, upload = jax.eval_shape(method.client, broadcast_of(state), own, batches, key)
        clients = state.weights.shape[0]
        uploads = jax.tree.map(lambda leaf: _Form((clients, *leaf.shape), leaf.dtype), upload)
        jax.eval_shape(method.server, state, uploads)


def batches_of_one(config: ConfigDict, experiment: Experiment) -> Batches:
    """Returns the shapes of what one client trains on in a round, see `engine.batches`."""
    domains = experiment.internal.domains
    longest = max(len(domain.train.images) for domain in domains)
    draw = sampler(config, experiment.internal)
    one, key = _Form((1,), jnp.int32), jax.eval_shape(jax.random.key, 0)
    drawn = jax.eval_shape(lambda sizes, who, key: draw(sizes, who, longest, key), one, one, key)
    place, images = drawn.index.shape[1:], domains[0].train.images
    batches = {
        "image": _Form(place, jnp.int32),
        "label": label_forms(domains[0].train, place),
        "valid": _Form(place, bool),
        "size": _Form((), jnp.int32),
        "client": _Form((), jnp.int32),
        "source": _Form((longest, *images.shape[1:]), images.dtype),
    }
    if what_validates(config):  # as `sampling.validation_batches` has them
        splits = [domain.validation for domain in domains]
        longest = max(len(split.images) for split in splits)
        size = min(config.eval_batch_size, longest)
        place = (math.ceil(longest / size), size)
        batches["validation"] = {
            "image": _Form((*place, *images.shape[1:]), images.dtype),
            "label": label_forms(splits[0], place),
            "valid": _Form(place, bool),
        }
    return batches


def _check_memory(config: ConfigDict, state: FederatedState, mesh: Mesh | None) -> None:
    """Raises ConfigError if the state of all clients is larger than the memory there is."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    places = 1 if on_cpu() else padded(1, mesh)  # on CPU all devices are one machine
    if size > (memory := _memory() * places):
        raise ConfigError(
            f"config.model={brief(config.model)} takes {size / 2**30:.0f} GB for the "
            f"{state.weights.shape[0]} clients' state, more than the {memory / 2**30:.0f} GB of "
            "this machine: choose a smaller model or fewer clients, or, where clients_per_round "
            "are not all, population=disk"
        )


def _memory() -> float:
    """Bytes of a device, or of the machine; infinite where neither is known."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return limit
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no POSIX system
        return math.inf
