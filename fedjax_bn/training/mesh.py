"""Spreads a run over devices: rows of clients over the axis "clients", and copies of all else.

If there are several processes, each reads and places only the rows of its own devices.
"""

import contextlib
import ctypes
import dataclasses
import os
import platform
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.engine.backend import on_cpu
from fedjax_bn.engine.devices import BATCH, CLIENTS, cpu_cores
from fedjax_bn.federation import FederatedState

PyTree = Any
_TRIED = (0, 10, 2), (0, 13)  # versions of jaxlib that know the flags of `_WAITING`
_WAITING = (  # seconds in which a device waits for others without a warning, and with one
    "xla_cpu_collective_call_warn_stuck_timeout_seconds",
    "xla_cpu_collective_call_terminate_timeout_seconds",
)
# Parameters of glibc's `mallopt`: M_MMAP_MAX, the blocks with pages of their own, and
# M_TRIM_THRESHOLD and M_TOP_PAD, the bytes up to which freed memory stays, in all and of a heap.
_GLIBC = {-4: 0, -1: 2**30, -2: 2**26}


def side_by_side(clients: int, cores: int, devices: int | None = None) -> int:
    """Returns over how many of XLA's devices on a CPU's cores `clients` train side by side.

    Up to twice as many devices as cores, where that leaves no core idle at the end of a round: the
    system shares out the cores. A large operation uses all cores on each device, so fewer clients
    than cores leave none idle. `devices` are those that there are, None for any number.
    """
    most = min(2 * cores, clients, devices or clients)
    for number in range(min(cores, most), most + 1):
        if clients % number == 0 or clients % number >= cores:
            return number
    return min(cores, most)


def divide_cpu(clients: int, batch: int, rows: int) -> None:
    """Gives JAX the devices of `choose_mesh` on the CPU, before its first array.

    Nothing changes if JAX has started, somebody chose their number, or this jaxlib was not tried.
    """
    count = clients * (batch or 1) or batch or side_by_side(rows, cpu_cores())
    tried = _TRIED[0] <= tuple(map(int, jaxlib.__version__.split(".")[:3])) < _TRIED[1]
    if count > 1 and tried and not _cpu_is_divided() and not jax.distributed.is_initialized():
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", count)
            # Otherwise XLA ends the process if a device waits a minute for the others' clients.
            limits = [f"--{name}={10**7}" for name in _WAITING if name not in _flags()]
            os.environ["XLA_FLAGS"] = " ".join([_flags(), *limits]).strip()
            _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Keeps up to 1 GiB of freed memory in the process, where the C library is glibc.

    Otherwise a program's temporaries are new pages in every round, which the system clears: a tenth
    of the CPU's time.
    """
    if platform.libc_ver()[0] == "glibc":
        for name, value in _GLIBC.items():
            ctypes.CDLL(None).mallopt(name, value)


def _flags() -> str:
    return os.environ.get("XLA_FLAGS", "")


def _cpu_is_divided() -> bool:
    chosen: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined,unused-ignore]
    return chosen >= 0 or "xla_force_host_platform_device_count" in _flags()


def cpu_mesh(clients: int) -> Mesh | None:
    """Returns the devices over which clients train side by side on a CPU; else None."""
    divide_cpu(0, 0, clients)
    default = jax.config.jax_default_device  # type: ignore[attr-defined,unused-ignore]
    if jax.default_backend() != "cpu" or default is not None or jax.process_count() > 1:
        return None
    count = side_by_side(clients, cpu_cores(), len(jax.devices()))
    return Mesh(np.array(jax.devices()[:count]), (CLIENTS,)) if count > 1 else None


def cpu_note(mesh: Mesh | None, clients: int) -> tuple[str, ...]:
    """Returns notes for the user on how clients share a CPU's cores."""
    count = side_by_side(clients, cpu_cores())
    if mesh is not None:
        return (mesh_note(mesh),)
    if count == 1 or not on_cpu() or _cpu_is_divided() or jax.process_count() > 1:
        return ()
    setting = f"jax.config.update('jax_num_cpu_devices', {count})"
    note = f"clients train one after another, as JAX has started with one device: {setting} before "
    return (f"{note}its first array lets them train side by side, which takes less time",)


def choose_mesh(
    clients: int, batch: int, rows: int, batch_size: int, spread: bool = True
) -> Mesh | None:
    """Returns the mesh that `config.mesh` describes; None for one device.

    `clients` devices (0: all) share out the `rows` clients of a round, and `batch` devices (0: as
    many as are left) a step of `batch_size` samples. On a CPU clients are `spread` by `cpu_mesh` if
    both are 0. ConfigError: there are too few devices, or a process would have none of the chosen
    ones.
    """
    if not clients and not batch and spread and (mesh := cpu_mesh(rows)):
        return mesh
    divide_cpu(clients or 1, batch, rows)
    devices = jax.devices()
    clients = clients or max(len(devices) // (batch or 1), 1)
    setting = f"config.mesh.clients={clients} with mesh.batch={batch}"
    if clients * (batch or 1) > len(devices):
        raise ConfigError(f"{setting} is more than the {len(devices)} devices: give 0 for all")
    if not batch:
        # Devices without a client of their own take a part of each batch.
        batch = min(max(clients // rows, 1), batch_size)
        clients = min(clients, rows)
    chosen = np.array(devices[: clients * batch])
    if idle := set(range(jax.process_count())) - {device.process_index for device in chosen}:
        raise ConfigError(f"{setting} leaves out process {min(idle)}: give a larger mesh")
    if chosen.size == 1 and jax.process_count() == 1:
        return None
    shape, names = ((clients, batch), (CLIENTS, BATCH)) if batch > 1 else ((clients,), (CLIENTS,))
    return Mesh(chosen.reshape(shape), names)


def shares_memory(mesh: Mesh | None) -> bool:
    """Returns whether the devices of a mesh are on the CPU of one process."""
    return mesh is not None and on_cpu() and jax.process_count() == 1


def memories(spread: NamedSharding | None) -> int:
    """Returns over how many memories rows [P, ...] with a sharding are spread."""
    if spread is None or shares_memory(spread.mesh):
        return 1
    devices = spread.mesh.size  # of which some may have the same rows
    return devices // spread.shard_shape((devices,))[0]


def clients_of(mesh: Mesh | None) -> NamedSharding | None:
    """Returns the sharding of rows [P, ...] by client; None for one device."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(CLIENTS))


def copies_on(mesh: Mesh | None) -> NamedSharding | None:
    """Returns the sharding of arrays of which every device has a copy; None for one device."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def mesh_note(mesh: Mesh | None) -> str:
    """Returns the devices of a run in words, for a message."""
    if mesh is None:
        return "one device"
    if shares_memory(mesh) and BATCH not in mesh.axis_names:
        return f"clients train side by side, {mesh.size} at a time on {cpu_cores()} cores"
    note = f"{mesh.size} devices ({mesh.devices.flat[0].device_kind}), clients over "
    note += f"{mesh.shape[CLIENTS]} and each batch over {mesh.shape.get(BATCH, 1)}"
    return f"{note}, in {jax.process_count()} processes" if jax.process_count() > 1 else note


def on_one_device(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Returns arrays on the first device of a CPU, where all would do the same work; else as is."""
    return jax.device_put(tree, mesh.devices.flat[0]) if mesh and shares_memory(mesh) else tree


def on_first_device(state: FederatedState, mesh: Mesh) -> FederatedState:
    """Returns a copy of the state on a mesh's first device, without rows of padding."""
    state = jax.device_put(state, mesh.devices.flat[0])
    rows = len(state.weights)
    personal, memory = jax.tree.map(lambda leaf: leaf[:rows], (state.personal, state.memory))
    return state._replace(personal=personal, memory=memory)


def shardings_of(state: FederatedState, mesh: Mesh) -> FederatedState:
    """Returns the sharding of each leaf; the clients' own [K, ...] are spread over their axis."""
    copies = jax.tree.map(lambda leaf: copies_on(mesh), state)
    rows = jax.tree.map(lambda leaf: clients_of(mesh), state)
    return copies._replace(personal=rows.personal, memory=rows.memory)


def form_on(state: PyTree, mesh: Mesh | None) -> PyTree:
    """Returns the state's `jax.ShapeDtypeStruct`s, with the sharding of each leaf on a mesh."""
    form = jax.eval_shape(lambda state: state, state)
    if dataclasses.is_dataclass(form):  # a `PopulationState`, whose rows stay on the host
        # As arrays without memory, by which `checkpoint.restore` knows what NumPy holds.
        host = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), form)
        common = jax.tree.map(lambda leaf: leaf.update(sharding=copies_on(mesh)), form.state)
        return dataclasses.replace(host, state=common)
    if mesh is None:
        return form
    return jax.tree.map(lambda x, spread: x.update(sharding=spread), form, shardings_of(form, mesh))


def place_rows(
    read: Callable[[int, int], PyTree], rows: int, sharding: NamedSharding | None
) -> PyTree:
    """Returns arrays [rows, ...] of which every device gets its own rows.

    `read(start, stop)` returns rows of this process's devices, a tree of NumPy arrays. `rows` is a
    multiple of the number of shards.
    """
    if sharding is None:
        return jax.tree.map(jnp.asarray, read(0, rows))
    # Not by `device_put` with the sharding, which needs all rows in every process.
    parts, tree = [], None
    for (start, stop), devices in _own_places(rows, sharding):
        tree = read(start, stop)
        parts += [jax.device_put(jax.tree.leaves(tree), device) for device in devices]
    join = jax.make_array_from_single_device_arrays
    leaves = [join((rows, *x[0].shape[1:]), sharding, [*x]) for x in zip(*parts, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def place_own(
    row_numbers: np.ndarray, rows: int, sharding: NamedSharding | None, tree: PyTree
) -> PyTree:
    """Returns arrays [rows, ...] from arrays of the rows `row_numbers` i64[n], see `own_rows`."""

    def read(start: int, stop: int) -> PyTree:
        place = int(np.searchsorted(row_numbers, start))
        return jax.tree.map(lambda leaf: leaf[place : place + stop - start], tree)

    return place_rows(read, rows, sharding)


def own_rows(rows: int, sharding: NamedSharding | None) -> np.ndarray:
    """Returns i64[n], the numbers of the rows on devices of this process, in order."""
    if sharding is None:
        return np.arange(rows)
    return np.concatenate([np.arange(*place) for place, _ in _own_places(rows, sharding)])


def _own_places(
    rows: int, sharding: NamedSharding
) -> list[tuple[tuple[int, int], list[jax.Device]]]:
    """Returns ((start, stop), this process's devices with these rows), in order."""
    # Devices that share a client's batch have the same rows, so a place may have several.
    devices_of: dict[tuple[int, int], list[jax.Device]] = {}
    for device, (index,) in sharding.addressable_devices_indices_map((rows,)).items():
        devices_of.setdefault(index.indices(rows)[:2], []).append(device)
    return sorted(devices_of.items(), key=lambda item: item[0])


def place_copies(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Returns arrays, or random keys, with a copy on every device of the mesh."""
    if mesh is None:
        return jax.device_put(tree)

    def copied(leaf: Any) -> jax.Array:
        # NumPy has no dtype for random keys, so their words are placed.
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            numbers = copied(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(leaf))
        values = np.asarray(leaf)
        return jax.make_array_from_callback(values.shape, copies_on(mesh), values.__getitem__)

    return jax.tree.map(copied, tree)


def gathered(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Returns the tree with a copy of all rows on each device, so every process can read it."""
    return tree if mesh is None else jax.jit(_same, out_shardings=copies_on(mesh))(tree)


def _same(tree: PyTree) -> PyTree:  # one function, so that each form of tree compiles once
    return tree
