"""Trains PACS at 224 pixels on one GPU for some minutes: FedAvg, FedBN and FedIG-A.

    python launch/sweeps/pacs_gpu.py pack --pacs PACS --resnet50 FILE --packages FOLDER
    python launch/sweeps/pacs_gpu.py run --packages FOLDER --workdir DIR --minutes 12
    python launch/sweeps/pacs_gpu.py report --workdir DIR

`pack` writes two files below 60 MB, for machines to which little can be sent at a time: images.tar
has JPEGs of 224 pixels, of the best quality that fits, and weights.safetensors the ResNet-50 of
launch/convert/keras_resnet.py with kernels in float16.

`run` trains the protocol of configs/pacs.py, with batches of 64 and each of the four domains left
out, from these weights, in bfloat16. A run has a share of the minutes, by what a round of its
method costs, and stops after the round in which the share ends; so all end some rounds late. The
same command continues. `report` prints accuracies at the round that validation selects, among the
rounds that all methods of a target have, and how many of the 40 these are.
"""

import argparse
import io
import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
from domains import DOMAINS
from PIL import Image
from plan import Protocol, Row, Run, Sweep, left_out, table, training
from safetensors.numpy import load_file, save_file
from sweep import commands

from fedjax_bn.training.records import select_round

CHANGES = {
    "model": "ResNet50:keras=True",
    "baselines": (),
    "compute_dtype": "bfloat16",
}
NEEDS = {"data.path": "pacs", "pretrained": "resnet50"}
TARGETS = left_out(DOMAINS["pacs"])
PACS = Protocol("pacs", "configs/pacs.py", TARGETS, 1, NEEDS, CHANGES)
FEDIGA = training("fediga", adaptations=("running", "zero_shot_adapter"))
ROWS = {
    "FedAvg": Row((training("fedavg", adaptations=("running",)),)),
    "FedBN": Row((training("fedbn", adaptations=("running",)),)),
    "FedIG": Row((FEDIGA,)),
    "FedIG-A": Row((FEDIGA,), "zero_shot_adapter"),
}
SWEEP = Sweep("pacs_gpu", "PACS at 224 pixels", (table("pacs", "PACS", PACS, ROWS),))
# The passes through the network of a step, which share out the minutes.
PASSES = {"fedavg": 3, "fedbn": 3, "fediga": 10}
IMAGES, WEIGHTS = "images.tar", "weights.safetensors"


def pack(pacs: Path, resnet50: Path, folder: Path, side: int, limit: int) -> None:
    """Writes the two packages, each below `limit` bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(resnet50)
    # Statistics and the parameters of batch norms are few, and some do not fit float16.
    small = {k: t.astype(np.float16) if t.ndim > 1 else t for k, t in tensors.items()}
    save_file(small, folder / WEIGHTS)
    paths = sorted(pacs.glob("*/*/*.jpg"))
    for quality in range(95, 0, -5):
        with tarfile.open(folder / IMAGES, "w") as archive:
            for path in paths:
                content = io.BytesIO()
                image = Image.open(path).convert("RGB").resize((side, side), Image.BILINEAR)
                image.save(content, "JPEG", quality=quality)
                entry = tarfile.TarInfo(str(path.relative_to(pacs)))
                entry.size = content.tell()
                content.seek(0)
                archive.addfile(entry, content)
        if (folder / IMAGES).stat().st_size < limit:
            break
    sizes = {name: (folder / name).stat().st_size for name in (IMAGES, WEIGHTS)}
    print(f"{len(paths)} images of quality {quality}; bytes: {sizes}")
    if max(sizes.values()) >= limit:
        raise SystemExit(f"a package is not below {limit} bytes")


def train_all(packages: Path, workdir: Path, minutes: float, changes: list[str]) -> None:
    """Trains every run for its share of the time, each from where it stopped."""
    end = time.monotonic() + 60 * minutes
    images = workdir / "images"
    if not images.exists():
        with tarfile.open(packages / IMAGES) as archive:
            archive.extractall(workdir / "partial", filter="data")
        (workdir / "partial").rename(images)
    data = {"pacs": str(images), "resnet50": str(packages / WEIGHTS)}
    # Stops train one target with all methods before the next.
    runs = sorted(SWEEP.runs, key=lambda run: run.changes["target"])
    passes = [PASSES[run.changes["method"]] for run in runs]
    for i, run in enumerate(runs):
        seconds = (end - time.monotonic()) * passes[i] / sum(passes[i:])
        for command in commands(run, workdir, data, changes, left=True) if seconds > 0 else ():
            with subprocess.Popen([sys.executable, *command]) as process:
                try:
                    status = process.wait(seconds)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGTERM)  # the round ends, and its state is saved
                    status = process.wait()
            if status not in (0, 130, -signal.SIGTERM):  # the last before it has started
                raise SystemExit(f"{run.name} ended with status {status}")


def records_of(run: Run, workdir: Path) -> list[dict]:
    """Returns a run's lines of metrics.jsonl."""
    path = workdir / run.name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(workdir: Path) -> str:
    """Returns the table of accuracies in percent, with the rounds of each target."""
    runs = {run.name: run for run in SWEEP.runs}
    lines = [["method", *TARGETS], ["---"] + ["---:"] * len(TARGETS), ["rounds of 40"]]
    lines += [[label] for label in ROWS]
    for target in PACS.targets:
        names = [PACS.names(target, row.trainings[0])[0] for row in ROWS.values()]
        records = [records_of(runs[name], workdir) for name in names]
        rounds = min(map(len, records))
        lines[2].append(str(rounds))
        for line, row, run_records in zip(lines[3:], ROWS.values(), records, strict=True):
            shared = run_records[:rounds]
            scores = shared[select_round(shared) - 1]["unseen"][target] if shared else {}
            line.append(f"{scores[row.adaptation]:.1f}" if shared else "")
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    """Packs, trains or reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("pack", "run", "report"))
    parser.add_argument("--pacs", type=Path, help="the folder DOMAIN/CLASS/*.jpg")
    parser.add_argument("--resnet50", type=Path, help="the file of keras_resnet.py")
    parser.add_argument("--packages", type=Path, help="the folder of the two packages")
    parser.add_argument("--workdir", type=Path, default=Path("runs/pacs_gpu"))
    parser.add_argument("--minutes", type=float, default=12)
    options, changes = parser.parse_known_args(arguments)
    if options.action == "pack":
        pack(options.pacs, options.resnet50, options.packages, 224, 60_000_000)
        return
    if options.action == "run":
        train_all(options.packages, options.workdir, options.minutes, changes)
    print(report(options.workdir))


if __name__ == "__main__":
    main()
