"""Clients over a mesh of devices: each device trains its own, and one reduction ends the round.

The mesh has an axis "clients"; rows are padded to a multiple of its length. The local mapping of
`fedjax_bn.engine.mapping` runs inside `jax.shard_map`: `vmap` over a sharded axis would gather
arrays, and `map` would train every client on every device.

If there are more devices than clients the mesh has a second axis, "batch", which divides the
samples of a client's batches. XLA inserts the reductions over that axis, for statistics of batch
norms, losses and gradients of any order, so that results are those of one device.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PyTree = Any
CLIENTS, BATCH = "clients", "batch"


class Meeting(NamedTuple):
    """How the devices of a round exchange arrays; on one device nothing changes.

    Attributes:
      together: `together(sums, rows) -> (sums, rows)`, in one reduction: sums over devices, and
        the rows [P, ...] of all clients from those of this device.
      mine: takes the rows of this device's clients from those of all.
    """

    together: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    mine: Callable[[PyTree], PyTree]


_ALONE = Meeting(together=lambda sums, rows: (sums, rows), mine=lambda rows: rows)


def checked_mesh(mesh: Mesh | None) -> Mesh | None:
    """Returns the mesh with axes whose shardings XLA propagates (`jax.make_mesh` has typed ones).

    Raises:
      ValueError: the mesh has no axis "clients".
    """
    if mesh is None:
        return None
    if CLIENTS not in mesh.axis_names:
        raise ValueError(
            f"the mesh has the axes {', '.join(mesh.axis_names)}, but clients are spread over one "
            "named 'clients': make it by jax.make_mesh((n,), ('clients',))"
        )
    return Mesh(mesh.devices, mesh.axis_names)


def padded(rows: int, mesh: Mesh | None) -> int:
    """Returns the number of rows for some clients: the next multiple of the mesh's clients axis."""
    devices = 1 if mesh is None else mesh.shape[CLIENTS]
    return -(-rows // devices) * devices


def pad_rows(tree: PyTree, rows: int, axis: int = 0) -> PyTree:
    """Pads the arrays [K, ...] of a tree with zeros (False) to `rows` along an axis."""

    def pad(leaf: jax.Array) -> jax.Array:
        missing = max(0, rows - leaf.shape[axis])
        widths = [(0, missing * (place == axis)) for place in range(leaf.ndim)]
        return jnp.pad(leaf, widths) if missing else leaf

    return jax.tree.map(pad, tree)


def split_batches(batches: dict[str, PyTree], mesh: Mesh | None) -> dict[str, PyTree]:
    """Divides the samples of batches [P, S, B, ...] over the axis "batch", if the mesh has one.

    B is padded to a multiple of that axis, with valid=False.
    """
    if mesh is None or BATCH not in mesh.axis_names:
        return batches
    devices = mesh.shape[BATCH]
    size = -(-batches["valid"].shape[2] // devices) * devices
    over = NamedSharding(mesh, PartitionSpec(CLIENTS, None, BATCH))
    sampled = {name: pad_rows(batches[name], size, axis=2) for name in ("image", "label", "valid")}
    return batches | jax.lax.with_sharding_constraint(sampled, over)


def divides_clients(mesh: Mesh | None) -> bool:
    """Returns whether each client has several devices, and different clients different ones."""
    sizes = {} if mesh is None else mesh.shape
    return min(sizes.get(CLIENTS, 1), sizes.get(BATCH, 1)) > 1


def place(tree: PyTree, mesh: Mesh | None, *, by_client: bool) -> PyTree:
    """Places a tree on the mesh's devices: rows [P, ...] divided by client, or a copy on each."""
    if mesh is None:
        return tree
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*[CLIENTS] * by_client)))


def on_each_device(
    function: Callable[[Meeting, PyTree, PyTree], tuple[PyTree, PyTree]],
    mesh: Mesh | None,
) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Returns a function that runs on each device of the clients axis with its clients' rows.

    Args:
      function: `function(meeting, common, rows) -> (everywhere, rows)`; `everywhere` is the same
        on all devices, because the devices have met for it.
      mesh: None for one device.

    Returns:
      A function (common, rows) -> (everywhere, rows). Every device gets the tree `common` whole;
      `rows` are arrays [P, ...], P a multiple of the axis, of all clients.
    """
    if mesh is None:
        return functools.partial(function, _ALONE)
    devices = mesh.shape[CLIENTS]

    def mine(tree: PyTree) -> PyTree:
        each = jax.tree.leaves(tree)[0].shape[0] // devices
        start = jax.lax.axis_index(CLIENTS) * each
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, each), tree)

    # One psum of sums and rows together: a gather besides would be a second reduction.
    def spread(leaf: jax.Array) -> jax.Array:
        # Truth values as floats: a sum of another type would be a reduction of its own.
        dtype = jnp.result_type(float) if leaf.dtype == bool else leaf.dtype
        each = leaf.shape[0]
        empty = jnp.zeros((each * devices, *leaf.shape[1:]), dtype)
        start = jax.lax.axis_index(CLIENTS) * each
        return jax.lax.dynamic_update_slice_in_dim(empty, leaf.astype(dtype), start, 0)

    def together(sums: PyTree, rows: PyTree) -> tuple[PyTree, PyTree]:
        sums, met = jax.lax.psum((sums, jax.tree.map(spread, rows)), CLIENTS)
        return sums, jax.tree.map(lambda all_, leaf: all_.astype(leaf.dtype), met, rows)

    by_client = PartitionSpec(CLIENTS)
    # Nothing is differentiated through the reduction, so that check_vma has nothing to find.
    return jax.shard_map(
        functools.partial(function, Meeting(together, mine)),
        mesh=mesh,
        in_specs=(PartitionSpec(), by_client),
        out_specs=(PartitionSpec(), by_client),
        axis_names={CLIENTS},
        check_vma=False,
    )


def apart(
    function: Callable[..., PyTree],
    mesh: Mesh | None,
    common: PyTree,
    rows: PyTree,
    parts: PyTree = None,
) -> PyTree:
    """Calls a function once on every device with that device's rows, without a reduction.

    Args:
      function: `function(common, rows, parts) -> tree`, arrays with a leading axis.
      mesh: None for one device.
      common: a tree that every device gets whole.
      rows: a tree of arrays [P, ...], divided by client.
      parts: a tree of arrays, divided over all devices by their leading axis.

    Returns:
      The function's results, concatenated over the devices: all devices if there are parts, else
      those of the clients axis.
    """
    if mesh is None:
        return function(common, rows, parts)
    by_client, over_all = PartitionSpec(CLIENTS), PartitionSpec(mesh.axis_names)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(PartitionSpec(), by_client, over_all),
        out_specs=by_client if parts is None else over_all,
        check_vma=False,
    )(common, rows, parts)
