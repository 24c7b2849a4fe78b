"""Maps a function of one client over all clients, on one device or on a mesh of devices.

Each device trains its clients one after another, all at once, or n at a time, which changes only
the order of sums. On CPU `vmap` over per-client kernels makes grouped convolutions, which XLA runs
at a tenth of the speed, so `auto` is `map` there. On TPU and GPU the network's size gives n.

A mesh has an axis "clients": each device trains its own clients inside `jax.shard_map`, and one
reduction ends the round. Rows are padded to a multiple of the axis. A second axis, "batch", divides
the samples of a client's batches; XLA inserts the reductions over it.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_bn.engine.backend import computed_once, on_cpu, on_gpu, on_tpu
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.engine.packed_vectors import packing
from fedjax_bn.engine.programs import operations, results, size_in_bytes

PyTree = Any
CLIENTS, BATCH = "clients", "batch"
_FAST = 2**27  # bytes of a core's fast memory; half of it is left to maps and gradients
_MAPS = 3 * 2**29  # bytes of a step's maps up to which clients together cost less on a TPU
_ROOM = 2**33  # bytes of a GPU's memory that a step's maps may take
_SMALL = 2**25  # bytes of a step's convolutions; DigitCNN's are 22 MB with batches of 64
# Part of the keys of JAX's trace cache, so that a trace is never reused for another mesh.
_mesh = jax.make_user_context(None)


def over_devices(mesh: Mesh | None) -> AbstractContextManager[None]:
    """Returns a context in which methods made without a mesh share out their clients over it."""
    return _mesh(mesh)


def current_mesh(mesh: Mesh | None) -> Mesh | None:
    """Returns the mesh that a method was made with, else that of `over_devices`."""
    return mesh or _mesh.value


def cpu_cores() -> int:
    """Returns the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def map_and_sum(
    function: Callable[..., tuple], clients: str, rows: PyTree, *stacked: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the sum of all clients' parts, their new rows and their results, both stacked.

    It never holds more parts than clients that run at once, and overwrites the old rows.

    Args:
      function: a pure function of one client's row and its other trees -> (part, row, result).
      clients: `auto`, `map` (one after another), `vmap` (all at once) or `vmap:at_once=n`.
      rows, *stacked: trees with leading axis K, one for each argument of `function`.
    """
    if not on_gpu():
        return _map_and_sum(function, clients, rows, *stacked)
    function = jax.jit(function, inline=True)  # traced once, though its shapes are needed too
    shapes = jax.eval_shape(lambda trees: jax.tree.map(lambda x: x[0], trees), (rows, *stacked))
    of_part, _, of_result = map(packing, jax.eval_shape(function, *shapes))
    of_row = packing(shapes[0])

    def on_packed(row: PyTree, *trees: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        part, row, result = function(of_row.unpack(row), *trees)
        return of_part.pack(part), of_row.pack(row), of_result.pack(result)

    part, rows, result = _map_and_sum(on_packed, clients, of_row.pack(rows), *stacked)
    return of_part.unpack(part), of_row.unpack(rows), of_result.unpack(result)


def _map_and_sum(function: Callable, clients: str, rows: PyTree, *stacked: PyTree) -> PyTree:
    """Does what `map_and_sum` says, leaf by leaf."""
    num_clients = jax.tree.leaves((rows, stacked))[0].shape[0]
    function = jax.jit(function, inline=True)  # traced once, though used several times
    # Of arrays on a mesh, so that the scan below is not traced anew for their shardings.
    shapes = jax.eval_shape(lambda trees: jax.tree.map(lambda x: x[0], trees), (rows, *stacked))
    if clients == "auto" and not on_cpu():
        size = _clients_that_fit(function.trace(*shapes).jaxpr.jaxpr, num_clients)
    else:
        size = min(clients_at_once(clients) or num_clients, num_clients)

    def together(rows: PyTree, group: tuple) -> tuple[PyTree, PyTree, PyTree]:
        parts, rows, results = jax.vmap(function)(rows, *group)
        return sum_over(lambda part: part, parts), rows, results

    if size == num_clients > 1:
        return together(rows, stacked)

    # A scan whose carry holds the sum and all rows, so that only one group's parts are held.
    def step(carry: tuple[PyTree, PyTree], inputs: tuple) -> tuple[tuple[PyTree, PyTree], PyTree]:
        (total, rows), (start, group) = carry, inputs
        count = jax.tree.leaves(group)[0].shape[0]
        # Update the rows in place. If the scan stacked them, XLA would fill and copy the arrays; it
        # would also copy all rows if one client's row were read in several places.
        before = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count), rows)
        before = computed_once(jax.lax.optimization_barrier(before))
        if size > 1:
            part, after, results = together(before, group)
        else:
            single = jax.tree.map(lambda x: x[0], (before, *group))
            part, *row_and_result = function(*single)
            after, results = jax.tree.map(lambda x: x[None], tuple(row_and_result))
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        rows = jax.tree.map(put, rows, after)
        return (jax.tree.map(jnp.add, total, part), rows), results

    grouped = num_clients - num_clients % size
    groups = jax.tree.map(lambda x: x[:grouped].reshape(-1, size, *x.shape[1:]), stacked)
    like, *_ = jax.eval_shape(function, *shapes)
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), rows
    begins = jnp.arange(0, grouped, size, dtype=jnp.int32)
    carry, results = jax.lax.scan(step, start, (begins, groups))
    results = jax.tree.map(lambda x: x.reshape(grouped, *x.shape[2:]), results)
    if grouped < num_clients:
        leftover = jax.tree.map(lambda x: x[grouped:], stacked)
        carry, leftover_results = step(carry, (jnp.int32(grouped), leftover))
        results = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), results, leftover_results)
    return *carry, results


def _clients_that_fit(program: Any, num_clients: int) -> int:
    """Returns how many of the clients of a device an accelerator trains at once."""
    carried, products = max(_loops(program), key=lambda loop: loop[1], default=(0, 0))
    # Clients together fill a TPU's vector registers better than one, but what they train has to
    # fit into a core's fast memory, and nothing is gained if the maps of one are large.
    if on_tpu():
        most_clients = min(_FAST // 2 // max(carried, 1), _MAPS // max(products, 1))
    else:
        # Clients together start fewer kernels, but their convolutions become grouped ones, which a
        # GPU computes slowly for large maps and in 16 bits.
        maps = results(program, ("conv_general_dilated",))
        if sum(map(size_in_bytes, maps)) > _SMALL or any(x.aval.dtype.itemsize < 4 for x in maps):
            return 1
        most_clients = _ROOM // max(products, 1)
    most_clients = max(1, min(most_clients, num_clients))
    # A number that divides the clients is preferred: a remainder is compiled a second time.
    even = max(n for n in range(1, most_clients + 1) if num_clients % n == 0)
    return even if 2 * even > most_clients else most_clients


def _loops(program: Any) -> Iterator[tuple[int, int]]:
    """Yields what each scan carries and the results of its products, in bytes."""
    for equation in operations(program):
        if equation.primitive.name == "scan":
            body = equation.params["jaxpr"].jaxpr
            # A carry leaves the loop as its body returns it; other results are stacked over steps.
            pairs = zip(equation.outvars, body.outvars, strict=True)
            carry = [inner for outer, inner in pairs if outer.aval.shape == inner.aval.shape]
            products = results(body, ("conv_general_dilated", "dot_general"))
            yield sum(map(size_in_bytes, carry)), sum(map(size_in_bytes, products))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def sum_over(function: Callable[..., PyTree], *stacked: PyTree) -> PyTree:
    """Returns sum_k function(row k of each tree), leaf by leaf, over trees [K, ...], also empty."""
    if not jax.tree.leaves(stacked):
        return function(*stacked)
    if not on_cpu():
        return jax.tree.map(lambda x: x.sum(0), jax.vmap(function)(*stacked))

    # XLA:CPU's own sum over a leading axis takes ten to forty times as long if rows are large.
    # Sums keep the dtypes of `function`, which widens 16-bit floats before they are added.
    def add(total: PyTree, rows: tuple) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, function(*rows)), None

    like = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], stacked))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    return jax.lax.scan(add, zeros, stacked)[0]


def clients_at_once(clients: str) -> int | None:
    """Returns how many clients a strategy trains at once; None for all, else ValueError."""
    if clients in ("auto", "map", "vmap"):
        return None if clients == "vmap" else 1
    match = re.fullmatch(r"vmap:(?:at_once=)?([1-9]\d*)", clients, re.ASCII)
    if match is None:
        raise ValueError(f"clients={clients!r} must be 'auto', 'map', 'vmap' or 'vmap:at_once=n'")
    return int(match[1])


class Meeting(NamedTuple):
    """How the devices of a round exchange arrays; on one device both functions change nothing."""

    devices: int = 1  # the number of devices over which clients are spread
    # `together(sums, rows) -> (sums, rows)` adds the sums of all devices and gathers all clients'
    # rows [P, ...], in one reduction. Dtypes stay
    together: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] = lambda sums, rows: (sums, rows)
    # `local_rows(rows) -> rows` takes the rows of this device's clients from the rows [K, ...] of
    # all clients, and 0 for padding
    local_rows: Callable[[PyTree], PyTree] = lambda rows: rows


def padded(rows: int, mesh: Mesh | None) -> int:
    """Returns `rows` rounded up to a multiple of the mesh's clients axis."""
    devices = 1 if mesh is None else mesh.shape[CLIENTS]
    return -(-rows // devices) * devices


def pad_rows(tree: PyTree, rows: int, axis: int = 0) -> PyTree:
    """Pads the arrays of a tree with zeros (False) to `rows` along an axis."""

    def pad(leaf: jax.Array) -> jax.Array:
        widths = [(0, 0)] * leaf.ndim
        widths[axis] = (0, max(0, rows - leaf.shape[axis]))
        return jnp.pad(leaf, widths) if any(widths[axis]) else leaf

    return jax.tree.map(pad, tree)


def split_batches(batches: dict[str, PyTree], mesh: Mesh | None) -> dict[str, PyTree]:
    """Divides the samples of batches [P, S, B, ...] over an axis "batch", with B padded to it."""
    if mesh is None or BATCH not in mesh.axis_names:
        return batches
    devices = mesh.shape[BATCH]
    size = -(-batches["valid"].shape[2] // devices) * devices
    over = NamedSharding(mesh, PartitionSpec(CLIENTS, None, BATCH))
    sampled = {name: pad_rows(batches[name], size, axis=2) for name in ("image", "label", "valid")}
    # From this constraint XLA derives how to divide all that is computed from the samples.
    return batches | jax.lax.with_sharding_constraint(sampled, over)


def place_on_mesh(tree: PyTree, mesh: Mesh | None, *, by_client: bool) -> PyTree:
    """Places a tree on the mesh's devices: rows [P, ...] divided by client, or a copy on each."""
    if mesh is None:
        return tree
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*[CLIENTS] * by_client)))


def on_each_device(
    function: Callable[[Meeting, PyTree, PyTree], tuple[PyTree, PyTree]], mesh: Mesh | None
) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Returns `(common, rows) -> (everywhere, rows)`, run on each device of the clients axis.

    `function(meeting, common, rows)` gets the tree `common` whole and its device's part of the rows
    [P, ...], P a multiple of the axis; its `everywhere` must be reduced over the devices.
    """
    if mesh is None:
        return functools.partial(function, Meeting())
    devices = mesh.shape[CLIENTS]

    def local_rows(tree: PyTree) -> PyTree:
        rows = padded(jax.tree.leaves(tree)[0].shape[0], mesh)
        per_device = rows // devices
        start, tree = jax.lax.axis_index(CLIENTS) * per_device, pad_rows(tree, rows)
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, per_device), tree)

    # One psum of sums and rows together: a separate gather would be a second reduction.
    def spread(leaf: jax.Array) -> jax.Array:
        leaf = _as_floats(leaf)
        per_device = leaf.shape[0]
        empty = jnp.zeros((per_device * devices, *leaf.shape[1:]), leaf.dtype)
        start = jax.lax.axis_index(CLIENTS) * per_device
        return jax.lax.dynamic_update_slice_in_dim(empty, leaf, start, 0)

    def together(sums: PyTree, rows: PyTree) -> tuple[PyTree, PyTree]:
        sums, met = jax.lax.psum((sums, jax.tree.map(spread, rows)), CLIENTS)
        return sums, jax.tree.map(lambda all_, leaf: _from_floats(all_, leaf.dtype), met, rows)

    by_client = PartitionSpec(CLIENTS)
    # Nothing is differentiated through the reduction, so check_vma would find nothing. Only the
    # clients axis is manual: XLA itself divides along "batch" and inserts the reductions there.
    return jax.shard_map(
        functools.partial(function, Meeting(devices, together, local_rows)),
        mesh=mesh,
        in_specs=(PartitionSpec(), by_client),
        out_specs=(PartitionSpec(), by_client),
        axis_names={CLIENTS},
        check_vma=False,
    )


def _as_floats(rows: jax.Array) -> jax.Array:
    """Returns rows [P, ...] in the default float dtype, integers as two halves [P, 2, ...]."""
    # Rows of another dtype would travel in a reduction of their own. A float32 holds 24 bits
    # exactly, and so each half of 32 bits.
    if jnp.issubdtype(rows.dtype, jnp.integer):
        rows = jnp.stack(jnp.divmod(rows, 2 ** (4 * rows.dtype.itemsize)), 1)
    return rows.astype(promote(rows.dtype, jnp.result_type(float)))


def _from_floats(rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Undoes `_as_floats` of rows of this dtype."""
    if jnp.issubdtype(dtype, jnp.integer):
        high, low = rows[:, 0].astype(dtype), rows[:, 1].astype(dtype)
        return high * 2 ** (4 * dtype.itemsize) + low
    return rows.astype(dtype)


def apart(
    function: Callable[..., PyTree],
    mesh: Mesh | None,
    common: PyTree,
    rows: PyTree,
    parts: PyTree = None,
) -> PyTree:
    """Calls `function(common, rows, parts)` on every device, without a reduction.

    Every device gets `common` whole, its clients' `rows` [P, ...], and its share of `parts`, whose
    leading axis is divided over all devices. Results are concatenated as parts, or else as rows.
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
