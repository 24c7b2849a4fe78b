"""Deployment over Flower: bytes a round, and rounds a minute and CPU seconds over loopback.

  python benchmarks/flower.py bytes                             a table of methods and models
  python benchmarks/flower.py rounds --clients 2 --rounds 4     one federation, from start to end

`rounds` starts launch/flower/local.sh, trains FedBN on scanners shared out among the clients, and
takes CPU seconds from the system's account of all its processes, those of Flower included: once
for one round and once for all, so that a round's share is without the start. Beside it stand the
same rounds of the simulation, in this process.
"""

import argparse
import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
METHODS = ("fedavg", "fedbn", "silobn", "scaffold", "feddc", "fediga", "fedcd")
MODELS = ("DigitCNN", "ResNet18", "ResNet50")
SUBREAPER = 36  # of prctl: who becomes the parent of processes whose own has ended
SAMPLES = "model=MLP,data.clients_per_domain={},eval_every=1000"


def bytes_of(method: str, model: str) -> dict[str, int]:
    """{"down", "up", "own"}: what one client gets and sends in a round, and what it keeps."""
    import jax

    from fedjax_bn.federation import own_of
    from fedjax_bn.run.config import base
    from fedjax_bn.run.experiment import assemble
    from fedjax_bn.run.finished import dataset_of
    from fedjax_bn.run.shapes import batches_of_one
    from fedjax_bn.run.start import make_keys, make_start
    from fedjax_bn.traffic import traffic

    config = base()
    config.method, config.model, config.mesh = method, model, "1"
    size = 28 if model == "DigitCNN" else 224
    form = {"num_classes": 7, "shape": [size, size, 3], "dtype": "uint8"}
    form |= {"dataset": "any", "clients": ["one"], "mean": [0.5], "std": [0.5]}
    experiment = assemble(config, dataset_of(form), ())
    state = jax.eval_shape(make_start(config, experiment, make_keys(config)))
    own = jax.eval_shape(lambda state: own_of(state, 0), state)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(own))
    return traffic(experiment.method, state, batches_of_one(config, experiment)) | {"own": kept}


def print_bytes() -> None:
    """The table, in megabytes: down, up, and what stays with a client."""
    print("| method | " + " | ".join(MODELS) + " |")
    print("|---" * (len(MODELS) + 1) + "|")
    for method in METHODS:
        cells = []
        for model in MODELS:
            found = bytes_of(method, model)
            cells.append(" / ".join(f"{found[key] / 1e6:.1f}" for key in ("down", "up", "own")))
        print(f"| {method} | " + " | ".join(cells) + " |")


def cpu_seconds() -> float:
    """Of all processes below this one that have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wait_for_all() -> None:
    """Until no process below this one is left."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def federate(folder: Path, clients: int, rounds: int) -> dict[str, float]:
    """One federation: {"cpu", "seconds" of its rounds together}."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shutil.copytree(ROOT / "launch" / "flower", folder / "app")
    script = folder / "app" / "local.sh"
    environment = os.environ | {
        "FEDERATION": str(folder / "runs"),
        "PORT": str(port),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    }
    changes = f"{SAMPLES.format(-(-clients // 5))},rounds={rounds}"
    config = {"changes": changes, "clients": clients, "minimum": clients}
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    before = cpu_seconds()
    quiet = {"env": environment, "check": True, "stdout": subprocess.DEVNULL}
    report = 'report="sizes,losses"'
    subprocess.run([script, "start", "-n", str(clients), report], **quiet)
    try:
        subprocess.run([script, "run", "--run-config", text], **quiet)
    finally:
        subprocess.run([script, "stop"], **quiet)
        wait_for_all()
    lines = (folder / "runs" / "server" / "metrics.jsonl").read_text().splitlines()
    seconds = sum(json.loads(line)["seconds"] for line in lines)
    return {"cpu": cpu_seconds() - before, "seconds": seconds, "rounds": len(lines)}


def simulate(clients: int, rounds: int) -> float:
    """CPU seconds of a round of the same clients in one program."""
    import jax

    from fedjax_bn.run.config_file import read
    from fedjax_bn.run.rounds import open_rounds
    from fedjax_bn.run.start import prepare

    changes = f"{SAMPLES.format(-(-clients // 5))},clients_per_round={clients},mesh=1"
    config = read(f"quickstart:{changes}")
    experiment, keys, start = prepare(config)
    state = start()
    round = open_rounds(config, experiment, keys, state).compile(state)
    state, _ = round(state)
    began = time.process_time()
    for _ in range(rounds):
        state, _ = jax.block_until_ready(round(state))
    return (time.process_time() - began) / rounds


def print_rounds(clients: int, rounds: int) -> None:
    """The line of a table: clients, rounds a minute, CPU seconds of a round and client."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    found = []
    for count in (1, rounds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(federate(Path(folder), clients, count))
    one, all_ = found
    cpu = (all_["cpu"] - one["cpu"]) / (rounds - 1)
    seconds = all_["seconds"] / all_["rounds"]
    simulated = simulate(clients, rounds)
    print(
        "| clients | rounds a minute | CPU s a round | CPU s a client | simulated CPU s a round |"
    )
    print(
        f"| {clients} | {60 / seconds:.2f} | {cpu:.1f} | {cpu / clients:.1f} | {simulated:.3f} |",
        flush=True,
    )


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["bytes", "rounds"])
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    if given.what == "bytes":
        print_bytes()
    else:
        print_rounds(given.clients, max(2, given.rounds))


if __name__ == "__main__":
    main()
