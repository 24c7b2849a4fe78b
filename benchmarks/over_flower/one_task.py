"""Times one task of a client's process, part by part: `python one_task.py FOLDER CHANGES`.

FOLDER holds the federation's config.py, CHANGES is empty or `key=value,...`. The first process
fills JAX's cache of compiled programs; a later one shows the cost of every task of every round.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

# part -> modules: first those that `flwr-clientapp` imports, then those of the app
IMPORTS = {
    "Flower": ("flwr.supernode.cli.flwr_clientapp", "flwr.supernode.runtime.run_clientapp"),
    "JAX": ("jax",),
    "ours": ("fedjax_bn.flower.site",),
}


def main() -> None:
    """Prints {part: CPU seconds} as JSON."""
    found: dict[str, float] = {}
    began = 0.0  # of the process

    def end(part: str) -> None:
        nonlocal began
        now = time.process_time()
        found[part], began = now - began, now

    end("Python")
    for part, modules in IMPORTS.items():
        for module in modules:
            importlib.import_module(module)
        end(f"import {part}")
    _work(Path(sys.argv[1]), sys.argv[2], end)
    print(json.dumps(found))


def _work(folder: Path, changes: str, end: Callable[[str], None]) -> None:
    import jax

    from fedjax_bn.engine.named_arrays import to_named
    from fedjax_bn.federation import broadcast_of, own_of
    from fedjax_bn.flower.messages import Order, packed, recorded
    from fedjax_bn.flower.settings import config_of, node_of
    from fedjax_bn.flower.site import open_site
    from fedjax_bn.flower.site_files import save_own

    config = config_of("config.py", changes, folder)
    site = open_site(config, node_of({"client": 0, "folder": str(folder)}), clients=2)
    end("read the data, build and check")
    state = jax.device_get(site.start())
    broadcast, own = broadcast_of(state), own_of(state, 0)
    order = Order("measured", config.method, 0, 2, 180, False)
    end("make the common start (first round only)")
    for part in ("trace, load the program and train", "train again"):
        kept, upload = jax.device_get(site.train(order, broadcast, own, folder / "begun.npz"))
        end(part)
    save_own(folder / "own", 1, kept, 0)
    packed(order, recorded(to_named(upload)))
    end("keep what stays, pack what goes")


if __name__ == "__main__":
    main()
