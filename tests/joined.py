"""What test_launch.py starts several times: processes that meet and add their numbers."""

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_bn.run.distributed import join


def main() -> None:
    """Prints who this process is and a sum over the devices of all."""
    join("--distributed" in sys.argv, timeout=60)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("clients",))
    own = np.full(jax.local_device_count(), jax.process_index() + 1, np.int32)
    numbers = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("clients")), own
    )
    add = jax.shard_map(
        lambda x: jax.lax.psum(x.sum(), "clients"),
        mesh=mesh,
        in_specs=PartitionSpec("clients"),
        out_specs=PartitionSpec(),
    )
    total = int(jax.jit(add)(numbers))
    print(f"{jax.process_index()} of {jax.process_count()}: {total}", flush=True)


if __name__ == "__main__":
    main()
