"""TPUs that are described and not there, for which libtpu compiles on any machine."""

import functools
import importlib.util
import os

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

MEMORY = 16 * 10**9  # bytes of one chip of a v5e
# Without these libtpu looks for chips of this machine, and no other process may load it.
_ALONE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu, the TPU's compiler: pip install 'jax[tpu]'",
)


@functools.cache
def four_chips() -> np.ndarray:
    """The devices of a v5e:2x2, [4]."""
    from jax.experimental import topologies

    os.environ.update(_ALONE)
    described = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2", chips_per_host_bounds=(2, 2, 1)
    )
    return np.array(described.devices)


def on_chips(*sides: int, axes: tuple[str, ...] = ("clients",)) -> Mesh:
    """The four chips as a mesh."""
    return Mesh(four_chips().reshape(sides), axes)


def shapes_on(sharding: jax.sharding.Sharding, tree):
    """The shapes of a tree's arrays, placed on devices."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
