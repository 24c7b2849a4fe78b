"""Makes the tables of docs/results/ again: all that two CPU cores make in a night.

    python launch/sweeps/tables.py --data DATA [--workdir runs] [--only 'fedbn/*'] [--dry-run]

DATA is a folder with digits.npz (configs/digits.py), pacs and maps.npz (configs/pacs.py), and of
launch/convert/keras_resnet.py resnet50.safetensors and, by --classes 7, resnet50_7.safetensors. A
table whose data are missing waits. It prints the tables with their numbers of runs, of which most
take one or two minutes, and makes one after another. WORKDIR/tables/NAME.txt has what a table's
commands print: the table, or at its end the path of the report. The same command continues after a
stop: runs that have finished are not repeated, and a table whose file exists is not made again. The
exit status is 0 if all tables are made, 1 if one failed, 3 if one waits.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from plan import ROOT

DATA = {
    "digits": "digits.npz",
    "pacs": "pacs",
    "resnet50": "resnet50.safetensors",
    "resnet50_7": "resnet50_7.safetensors",
    "maps": "maps.npz",
    "data": "",
}


class Table(NamedTuple):
    """A table of docs/results/: its number of runs, and its commands, arguments of Python."""

    runs: int
    commands: tuple[str, ...]


def swept(runs: int, sweep: str, options: str = "", folder: str = "") -> Table:
    """Returns the table of a sweep: its runs and its report."""
    script = f"launch/sweeps/{sweep}.py"
    workdir = f"--workdir {{workdir}}/{folder or sweep}"
    return Table(runs, (f"{script} run {workdir} {options}", f"{script} report {workdir}"))


def seeded(folder: str, command: str) -> Table:
    """Returns the table of a method and a baseline of fedjax_bn.main with the seeds 0, 1 and 2."""
    main, place = "-m fedjax_bn.main", f"{{workdir}}/{folder}"
    runs = [f"{main} {command} --config.seed={n} --workdir {place}/{n}" for n in range(3)]
    return Table(6, (*runs, f"{main} report {place} --out {place}/report.html"))


DIGITS = (
    "--config configs/digits.py --config.data.path={digits} --config.rounds=30 "
    "--config.eval_every=30 --config.baselines=fedavg"
)
STREAMS = "--only fax,mnist --digits {digits} --workdir {workdir}/streams"
RESNET10 = "--path {pacs} --model ResNet10:width=16 --steps 4 --rounds 6 --only none,mean,sum"
RESNET50 = (
    "--path {pacs} --model ResNet50:keras=True --pretrained {resnet50} --size 96 --batch 8 "
    "--steps 5 --rounds 2 --only mean,sum"
)
PACS = "--data.maps={maps} --data.resnet50={resnet50_7}"
QUICKSTART = (
    "--only quickstart:baselines=singleset,fedavg,adaptations=running,batch,tsmobn "
    "--workdir {workdir}/examples"
)
TABLES = {
    "fedbn/scanners": Table(21, (f"benchmarks/examples.py {QUICKSTART}",)),
    "fedbn/digits": seeded("digits", DIGITS),
    "fedbn/lag": swept(45, "lag", "--data {data}"),
    "fedbn/gaussians": swept(10, "fedbn", "--only 'synthetic/*'"),
    "unseen/digits": swept(45, "unseen", "--only digits,ablations --data.digits={digits}"),
    "fediga/cafl": Table(9, (f"benchmarks/cafl.py {RESNET10}",)),
    "fediga/imagenet": Table(6, (f"benchmarks/cafl.py {RESNET50}",)),
    "unifed/theory": Table(3, ("launch/theory --workdir {workdir}/theory",)),
    "fedcd/beach": swept(21, "fedcd_small", "--only beach"),
    "fedcd/masks": Table(12, ("benchmarks/masks.py --only as_model,adam,decay_20,bounds",)),
    "other/pacs": swept(48, "pacs_imagenet", PACS),
    "other/streams": Table(12, (f"launch/sweeps/streams.py {STREAMS}",)),
    "other/attacks": Table(165, ("launch/sweeps/attacks.py --workdir {workdir}/attacks",)),
}


def make(table: Table, places: dict[str, str], path: Path) -> bool:
    """Runs a table's commands into a file, which has its name once all have succeeded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    with unfinished.open("w") as file:
        for command in table.commands:
            arguments = [argument.format(**places) for argument in shlex.split(command)]
            print(shlex.join(["python", *arguments]), file=file, flush=True)
            if subprocess.run([sys.executable, *arguments], stdout=file, cwd=ROOT).returncode:
                return False
    unfinished.rename(path)
    return True


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--workdir", type=Path, default=Path("runs"))
    parser.add_argument("--only", default="*", help="globs of tables, with commas between them")
    parser.add_argument("--dry-run", action="store_true", help="print what there is to do")
    options = parser.parse_args(arguments)
    paths = {name: options.data.absolute() / part for name, part in DATA.items()}
    places = {name: str(path) for name, path in paths.items() if path.exists()}
    places["workdir"] = str(options.workdir.absolute())
    states, files = {}, {}
    for name in TABLES:
        if any(fnmatch(name, glob) for glob in options.only.split(",")):
            files[name] = options.workdir / "tables" / f"{name.replace('/', '-')}.txt"
            text = " ".join(TABLES[name].commands)
            lacking = [part for part in DATA if f"{{{part}}}" in text and part not in places]
            waits = f"waits for DATA/{DATA[lacking[0]]}" if lacking else ""
            states[name] = "made before" if files[name].exists() else waits
            print(f"{name:16} {states[name] or f'{TABLES[name].runs} runs'}")
    unmade = [name for name, state in states.items() if not state]
    print(f"{sum(TABLES[name].runs for name in unmade)} runs are to be made", flush=True)
    for name in [] if options.dry_run else unmade:
        start = time.monotonic()
        states[name] = "made" if make(TABLES[name], places, files[name]) else "failed"
        print(
            f"{name:16} {states[name]}, {(time.monotonic() - start) / 60:.0f} minutes", flush=True
        )
    failed, waiting = ([s for s in states.values() if s.startswith(k)] for k in ("failed", "waits"))
    return 1 if failed else 3 if waiting else 0


if __name__ == "__main__":
    sys.exit(main())
