"""Times a round beside Flower's simulation, pfl-research and a plain PyTorch loop (Linux).

    python benchmarks/peers.py --environments runs/peers             # makes them first: 3 GB, once
    python benchmarks/peers.py --environments runs/peers --network ResNet18 --samples 32 --json

Each program has its own environment, made with venv and pip, and runs as its own process: the same
network from the same tensors, the same batches in the same order, the same plain SGD, equal weights
for all clients, all of them in every round. The programs take turns round by round, in a new random
order each time. Every client's mean training loss must be equal in the first round (float32), or
the command fails. CPU seconds and memory are those of a program and all its children. If a program
cannot be installed or started, its error is printed, the others are compared, and the status is 1.
Ratios are the other program's wall time over ours: above 1 ours is faster.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from interleave import Samples, conclude, figures, interleave, paired_ratio, show
from machine import announce
from peer_programs import rounds
from peer_programs.process import Peer
from tasks import DIGITS, RESNET, make_batches

TASKS = {task.name: task for task in (DIGITS, RESNET)}
REST = 0.3  # OpenMP's threads spin for up to 0.2 s after their work
TOLERANCE = 1e-3  # of a client's mean loss over its steps in the first round, relative


TORCH = "torch==2.13.0"  # the one of `make benchmark`


class Program(NamedTuple):
    """A program to compare."""

    module: str  # in `peer_programs`
    packages: tuple[str, ...] = ()  # the packages for pip; empty: the program runs in this Python


PROGRAMS = {
    "ours": Program("ours"),
    "PyTorch": Program("in_pytorch", (TORCH, "numpy==2.4.6")),
    "Flower": Program("flower", (TORCH, "flwr[simulation]==1.41.0")),
    "pfl-research": Program("pfl_research", (TORCH, "pfl==0.6.0")),
}


def main() -> None:
    """Prepares the environments, compares the programs, and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    others = [name for name in PROGRAMS if name != "ours"]
    add("--environments", type=Path, required=True, help="folder of the environments; is kept")
    add("--python", default=sys.executable, help="makes them; pfl-research wants 3.10 or newer")
    add("--network", default="DigitCNN", choices=TASKS)
    add("--clients", type=int, default=4)
    add("--samples", type=int, default=320, help="of a client; default %(default)s")
    add("--only", nargs="+", default=others, choices=others, help="default: all")
    add("--repeats", type=int, default=15, help="timed rounds of each; default %(default)s")
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    options.environments.mkdir(parents=True, exist_ok=True)
    here = announce(
        f"{options.network}: {options.clients} clients of {options.samples} images, "
        "one epoch a round; ratio = other / ours, above 1 ours is faster"
    )
    pythons, failed = {"ours": sys.executable}, {}
    for name in dict.fromkeys(("PyTorch", *options.only)):  # PyTorch draws the tensors for all
        path, why = prepare(options.environments, PROGRAMS[name], options.python)
        if path is None:
            failed[name] = f"its environment could not be made: {why}"
        else:
            pythons[name] = path
    if "PyTorch" not in pythons:
        raise SystemExit(f"PyTorch is not compared, and so nothing: {failed['PyTorch']}")
    task = write_task(options, pythons["PyTorch"])
    peers, refused = start(options, pythons, task)
    failed |= refused
    try:
        result = compare(peers, options.repeats) if "ours" in peers else {}
    finally:
        for peer in peers.values():
            peer.end()
    for name, why in failed.items():
        print(f"{name} is not compared: {why}")
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items()}
        print(json.dumps({"machine": here, **settings, **result, "not_compared": failed}))
    if failed:
        sys.exit(1)


def prepare(
    folder: Path, program: Program, python: str, say: Callable[[str], object] = print
) -> tuple[str | None, str]:
    """Returns the interpreter of a program's environment in `folder`, made where it is missing.

    If it cannot be made, returns None and the last words of pip or venv.
    """
    home = folder / program.module
    interpreter, mark = home / "bin" / "python", home / "installed"
    wanted = "\n".join(program.packages)
    if mark.exists() and mark.read_text() == wanted:
        return str(interpreter), ""
    say(f"making {home} with {', '.join(program.packages)}")
    install = [str(interpreter), "-m", "pip", "install", "--quiet", *program.packages]
    for command in ([python, "-m", "venv", "--clear", str(home)], install):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
            return None, f"{' '.join(command[1:4])}: {' '.join(errors)[:600]}"
    mark.write_text(wanted)
    return str(interpreter), ""


def write_task(options: argparse.Namespace, python: str) -> Path:
    """Writes full batches and the network's initial tensors to a file for all programs."""
    task = TASKS[options.network]
    if options.samples % task.batch:
        raise SystemExit(
            f"--samples {options.samples} is not a multiple of the batch, {task.batch}"
        )
    task = task._replace(clients=options.clients, samples=options.samples)
    arrays = {name: array for name, array in make_batches(task).items() if name != "valid"}
    path = (options.environments / "task.npz").resolve()
    rounds.write(path, arrays, {})
    command = [python, "-m", "peer_programs.in_pytorch", options.network, str(path), "--draw"]
    subprocess.run(command, check=True, cwd=Path(__file__).parent)
    return path


def start(
    options: argparse.Namespace, pythons: dict[str, str], task: Path
) -> tuple[dict[str, Peer], dict[str, str]]:
    """Returns the programs that made a first round, and the reasons why others did not."""
    peers, failed = {}, {}
    for name in ("ours", *options.only):
        if name in pythons:
            module, peer = PROGRAMS[name].module, None
            log = options.environments / f"{module}.log"
            try:
                peer = Peer(pythons[name], module, options.network, task, log)
                peer.a_round()
                peers[name] = peer
            except RuntimeError as error:
                failed[name] = str(error)
                if peer:
                    peer.end()
    return peers, failed


def compare(peers: dict[str, Peer], repeats: int) -> dict[str, Any]:
    """Runs rounds in turn; prints times, memory, losses and ratios."""
    order: list[str] = []

    # between rounds, because reading the memory of all processes takes longer than some rounds
    def before(name: str) -> None:
        if order:
            peers[order[-1]].weigh()  # the last program's memory after its round
        order.append(name)

    runs = {name: peer.a_round for name, peer in peers.items()}
    timed = interleave(runs, repeats, before=before, rest=REST)
    peers[order[-1]].weigh()
    agree = check_losses({name: peer.losses for name, peer in peers.items()})
    samples = {name: with_cpu(timed[name], peer) for name, peer in peers.items()}
    show(samples, "ours")
    print(
        "megabytes: " + "; ".join(f"{name} {peer.megabytes:,.0f}" for name, peer in peers.items())
    )
    for name in peers:
        if name != "ours":
            conclude(f"{name} / ours", paired_ratio(samples[name], samples["ours"]))
    megabytes = {name: round(peer.megabytes, 1) for name, peer in peers.items()}
    return {"rounds": figures(samples, "ours"), "megabytes": megabytes, "loss_deviation": agree}


def with_cpu(timed: Samples, peer: Peer) -> Samples:
    """Returns the wall times with CPU seconds of the program's processes, in the same rounds."""
    user, system = np.array(peer.cpu[-len(timed.wall) :]).T
    return Samples(timed.wall, user, system)


def check_losses(losses: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    """Returns, by program and round, the largest relative deviation of a client's loss from ours.

    A deviation above `TOLERANCE` in the first round ends the command.
    """
    ours = np.array(losses["ours"])
    deviations = {
        name: (abs(np.array(own) - ours) / abs(ours)).max(1).tolist()
        for name, own in losses.items()
        if name != "ours"
    }
    for name, by_round in deviations.items():
        print(f"losses: {name} within {by_round[0]:.1e} of ours in the first round")
        if not by_round[0] <= TOLERANCE:
            raise SystemExit(f"{name} does other work: {losses[name][0]}, ours {losses['ours'][0]}")
    return deviations


if __name__ == "__main__":
    main()
