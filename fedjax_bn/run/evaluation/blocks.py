"""Test batches of a run: all of them on the device where they fit, else block after block."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from jax.sharding import Mesh

from fedjax_bn.data.domain import Split
from fedjax_bn.run.evaluation.scoring_data import TestData, stack_batches
from fedjax_bn.run.processes.mesh import over_all, own_rows, place_copies, place_own
from fedjax_bn.run.training.stream import megabytes, stream_tests


def batches_of_tests(
    splits: Sequence[Split],
    batch_size: int,
    device_megabytes: float,
    mesh: Mesh | None = None,
    where: str = "clients",
) -> Callable[[], Iterable[TestData]]:
    """Returns `parts()`, the test batches: all of them on the device, or block after block.

    On a mesh they lie where their clients' models do ("clients"), each device has as many
    ("parts"), or all have all ("copies").
    """
    over, by_client = (None if where == "copies" else mesh), where == "clients"
    fits = megabytes(splits) <= device_megabytes * (1 if over is None else over.size)
    put = partial(place_copies, mesh=mesh) if over is None else partial(_put, over)
    if fits:
        resident = stack_batches(splits, batch_size, over, by_client)
        resident = resident if over is not None else put(resident)
        return lambda: (resident,)
    return lambda: map(put, stream_tests(splits, batch_size, device_megabytes, over, by_client))


def _put(mesh: Mesh, block: TestData) -> TestData:
    """A block of a stream, with the batches of this process's devices, on the mesh."""
    over = over_all(mesh)
    own = own_rows(mesh.size, over)
    length = len(block.client) // len(own)
    rows = (own[:, None] * length + np.arange(length)).reshape(-1)
    return place_own(rows, mesh.size * length, over, block)
