"""Lists the TPUs for which `tpu_compile.py` compiles: topologies, memory, peaks."""

import math
from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """One device of a TPU, as its compiler describes it."""

    # bytes that the compiler gives a program, as its message says for one that is larger
    memory: int
    # operations in bfloat16 at best in a cycle; a multiplication and an addition are 2
    per_cycle: int
    cores: int = 1  # devices of a chip


# The pages docs.cloud.google.com/tpu/docs/v5e, v6e, v4 and v5p give memory, teraflops and units for
# matrix products of a chip; a unit of n x n does n * n * 2 operations a cycle.
CHIPS = {
    # 16 GB; 4 units of 128 x 128: 197 Tflop/s at 1.5 GHz
    "v5e": Chip(int(15.75 * GIB), 4 * 128**2 * 2),
    # 32 GB; the page says 2 units of 256 x 256, and said 4 before. It is 4, because the compiler
    # estimates 456,000 operations a cycle for a large product: 918 Tflop/s at 1.75 GHz.
    "v6e": Chip(int(31.25 * GIB), 4 * 256**2 * 2),
    # Each of two TensorCores is a device, with half of 32 GB; 4 units of 128 x 128: 275 Tflop/s of
    # a chip at 1.05 GHz
    "v4": Chip(int(15.25 * GIB), 4 * 128**2 * 2, cores=2),
    # 95 GB; two TensorCores are one device, 8 units of 128 x 128: 459 Tflop/s at 1.75 GHz
    "v5p": Chip(int(95.74 * GIB), 8 * 128**2 * 2),
}
TOPOLOGIES = (
    *("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v6e:1x1", "v6e:2x2", "v6e:2x4", "v6e:4x4"),
    *("v4:2x2x1", "v4:2x2x2", "v5p:2x2x1", "v5p:2x2x2"),
)


def chip_of(topology: str) -> Chip:
    """Returns the chip of a topology such as `v5e:2x2`.

    Raises:
      ValueError: there is no such topology.
    """
    if topology not in TOPOLOGIES:
        raise ValueError(
            f"the topology {topology!r} is not one: give one of {', '.join(TOPOLOGIES)}"
        )
    return CHIPS[topology.partition(":")[0]]


def devices_of(topology: str) -> int:
    """Returns the number of devices of a topology."""
    sides = topology.partition(":")[2].split("x")
    return chip_of(topology).cores * math.prod(map(int, sides))
