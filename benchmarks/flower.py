"""Measures deployment over Flower: bytes a round, and a round's cost beside the simulated one.

  python benchmarks/flower.py bytes                             a table of methods and models
  python benchmarks/flower.py overhead --clients 2,8,32         in one process, by Flower's messages
  python benchmarks/flower.py rounds --clients 8 --rounds 3     over processes, from start to end
  python benchmarks/flower.py task                              one task of a client, by its parts

The method is FedBN on two of the quickstart's scanners, divided among the clients, with 180 images
each and one local epoch. `rounds` starts launch/flower/local.sh twice: with our app (by default on
MLP, because 32 clients of DigitCNN need more memory than a small machine has), and with an app that
only sends the same arrays to and fro, which shows Flower's own cost (--no-empty leaves this out,
which saves half of the time). CPU seconds are those of all cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = {"DigitCNN": 28, "AlexNet": 224, "ResNet18": 224, "ResNet50": 224, "DenseNet121": 224}
CLIENTS = 10  # the bytes of methods that send parts of each client to all others grow with it


def bytes_of(method: str, model: str) -> dict[str, int]:
    """Returns the bytes that a client gets ("down"), sends ("up") and keeps ("own") in a round."""
    import jax

    from fedjax_bn.federation import own_of, traffic
    from fedjax_bn.run.config import base
    from fedjax_bn.run.experiment.build import assemble
    from fedjax_bn.run.files.finished_run import dataset_of
    from fedjax_bn.training.start import batches_of_one, make_keys, make_start

    config = base()
    config.method, config.mesh.clients = "feddg:spectra=4" if method == "feddg" else method, 1
    config.model = f"{model}:norm=none" if method == "fedwon" else model
    form = {"num_classes": 7, "shape": [MODELS[model]] * 2 + [3], "dtype": "uint8"}
    form |= {"dataset": "any", "clients": ["one"], "mean": [0.5], "std": [0.5]}
    experiment = assemble(config, dataset_of(form), ())
    keys = make_keys(config.seed)
    state = jax.eval_shape(make_start(experiment, keys, rows=1, clients=CLIENTS))
    own = jax.eval_shape(lambda state: own_of(state, 0), state)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(own))
    return traffic(experiment.method, state, batches_of_one(experiment)) | {"own": kept}


def print_bytes() -> None:
    """Prints megabytes down, up, and kept by a client; methods with equal numbers share a row."""
    from fedjax_bn.run.experiment.method import METHODS

    alike: dict[tuple[str, ...], list[str]] = {}
    for method in sorted(METHODS):
        cells = []
        for model in MODELS:
            found = bytes_of(method, model)
            cells.append(" / ".join(f"{found[key] / 1e6:.1f}" for key in ("down", "up", "own")))
        alike.setdefault(tuple(cells), []).append(method)
    print(f"| methods, {CLIENTS} clients | " + " | ".join(MODELS) + " |")
    print("|---" * (len(MODELS) + 1) + "|")
    for cells, names in alike.items():
        print(f"| {', '.join(names)} | " + " | ".join(cells) + " |")


def print_overhead(counts: list[int], rounds: int, changes: str) -> None:
    """Prints the CPU seconds of a round for each number of clients."""
    from over_flower.one_process import overhead

    print("| clients | simulated | federated | of it Flower's own | ratio without Flower's own |")
    print("|---|---|---|---|---|")
    for count in counts:
        found = overhead(count, rounds, changes)
        numbers = f"{found.simulated:.2f} | {found.federated:.2f} | {found.flower:.2f}"
        ratio = (found.federated - found.flower) / found.simulated
        print(f"| {count} | {numbers} | {ratio:.2f} |", flush=True)


def print_rounds(counts: list[int], rounds: int, changes: str, empty: bool) -> None:
    """Prints the speed, and the CPU seconds by client and round, for each number of clients."""
    from over_flower.processes import arrays_of, federate

    heads = "clients | rounds a minute | CPU s a client and round | with an empty app | memory GB"
    print(f"| {heads} |\n|---|---|---|---|---|")
    for count in counts:
        ours = federate(count, rounds, changes)
        rate, cpu, own = f"{60 / ours.seconds:.2f}", f"{ours.cpu / count:.1f}", ""
        if empty:
            with arrays_of(count, changes) as arrays:
                own = f"{federate(count, rounds, '', echo=arrays).cpu / count:.1f}"
        print(f"| {count} | {rate} | {cpu} | {own} | {ours.memory:.1f} |", flush=True)


def print_task(repeats: int, changes: str) -> None:
    """Prints medians of the parts of a client's task, after one process that fills the cache."""
    from statistics import median

    from over_flower import write_config

    root = Path(__file__).parents[1]
    script = root / "benchmarks" / "over_flower" / "one_task.py"
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), 2)
        command = [sys.executable, str(script), folder, changes]
        environment = os.environ | {"PYTHONPATH": str(root)}
        taken = [
            json.loads(subprocess.check_output(command, env=environment).splitlines()[-1])
            for _ in range(repeats + 1)
        ][1:]
    for part in taken[0]:
        print(f"{median(one[part] for one in taken):7.3f}  {part}")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["bytes", "overhead", "rounds", "task"])
    parser.add_argument("--clients", default="2", help="numbers, with commas; default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--empty", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--changes", default=None, help="of the configuration, key=value,...")
    given = parser.parse_args()
    counts, rounds = [int(part) for part in given.clients.split(",")], max(2, given.rounds)
    if given.what == "bytes":
        print_bytes()
    elif given.what == "overhead":
        print_overhead(counts, rounds, given.changes or "")
    elif given.what == "rounds":
        changes = "model=MLP" if given.changes is None else given.changes
        print_rounds(counts, rounds, changes, given.empty)
    else:
        print_task(rounds, given.changes or "")


if __name__ == "__main__":
    main()
