"""What test_launch.py starts several times: processes that meet, add their numbers and stop."""

import os
import signal
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_bn.training.together import join


def main() -> None:
    """Prints who this process is, a sum over the devices of all, and whether SIGTERM stops it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command does
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
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        stopped = "not stopped"
    except KeyboardInterrupt:
        stopped = "stopped"
    print(f"{jax.process_index()} of {jax.process_count()}: {total}, {stopped}", flush=True)


if __name__ == "__main__":
    main()
