"""Times the command from its start to the end of the first round, by parts.

    python benchmarks/start_up.py --repeats 5 --config digits.py:data.path=FOLDER --json

Each repetition starts the command twice in processes of their own: the first finds no cache, the
second finds decoded images and compiled programs. `rest` is the time outside all parts: reading the
configuration, claiming the workdir, printing, opening logs and checkpoints.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

# part -> the module, and its function that is timed
FUNCTIONS = {
    "data, network": ("fedjax_bn.run.train", "prepare"),
    "initial state": ("fedjax_bn.training.checkpoint", "latest_state"),
    "batches": ("fedjax_bn.run.train", "open_rounds"),
}
STARTS = ("first start", "later start")


def here() -> tuple[float, float]:
    """Returns the clock's seconds, and the CPU seconds of this process."""
    return time.time(), time.process_time()


class Parts:
    """Seconds of each part so far, wall and CPU."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    def end(self, part: str, start: tuple[float, float]) -> None:
        """Charges a part with the time since `start`."""
        self.seconds[part] = tuple(now - then for now, then in zip(here(), start, strict=True))

    def timed(self, part: str, function: Callable) -> Callable:
        """Returns the function, which charges the part with its first call."""

        def call(*arguments: Any, **options: Any) -> Any:
            start = here()
            result = function(*arguments, **options)
            if part not in self.seconds:
                self.end(part, start)
            return result

        return call


def one_start(began: float, file: str) -> None:
    """Runs the command until the end of its first round; writes seconds by part."""
    parts = Parts()
    parts.end("interpreter", (began, 0.0))
    start = here()
    from fedjax_bn import main
    from fedjax_bn.run import train
    from fedjax_bn.training import rounds

    parts.end("imports", start)
    for part, (module, name) in FUNCTIONS.items():
        place = sys.modules[module]
        setattr(place, name, parts.timed(part, getattr(place, name)))
    first: list[tuple[float, float]] = []
    train.open_rounds = compiled_in_parts(parts, train.open_rounds, first)

    def after_the_round(*arguments: Any) -> None:
        parts.end("first round", first[0])
        parts.end("total", (began, 0.0))
        Path(file).write_text(json.dumps(parts.seconds))
        raise SystemExit(0)

    rounds.round_record = after_the_round
    main.command()


def compiled_in_parts(
    parts: Parts, open_rounds: Callable, first: list[tuple[float, float]]
) -> Callable:
    """Returns `open_rounds` whose rounds charge their compilation and note the first start."""

    def opened(*arguments: Any) -> Any:
        rounds = open_rounds(*arguments)

        def compile(state: Any) -> Callable:
            round = parts.timed("compile", rounds.compile)(state)

            def noted(state: Any) -> Any:
                first.append(here())
                return round(state)

            return noted

        return rounds._replace(compile=compile)

    return opened


def measure(config: str, changes: list[str], repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the seconds by part of every start; `rest` is the total minus all parts."""
    taken: dict[str, list[dict[str, Any]]] = {start: [] for start in STARTS}
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true"}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            given = ["--config", config, f"--config.data.cache={folder}/data", *changes]
            given += [f"--config.compilation_cache={folder}/c"]
            for start in STARTS:
                run = [sys.executable, __file__, "--one-start", str(time.time())]
                run += [f"{folder}/parts.json", *given, "--workdir", f"{folder}/{start}"]
                subprocess.run(run, check=True, stdout=subprocess.DEVNULL, env=environment)
                seconds = json.loads(Path(folder, "parts.json").read_text())
                total = seconds.pop("total")
                parts = seconds.values()
                rest = [whole - sum(part[i] for part in parts) for i, whole in enumerate(total)]
                taken[start].append(seconds | {"rest": rest, "total": total})
    return taken


def main() -> None:
    """Starts the command again and again and prints the table."""
    import numpy as np

    from machine import announce

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options, changes = parser.parse_known_args()
    machine = announce(f"seconds from the command to the end of the first round, {options.config}")
    taken = measure(options.config, changes, options.repeats)
    print(f"median [least, most] of {options.repeats}; wall, and CPU of all cores")
    results: dict[str, dict[str, Any]] = {}
    for start, runs in taken.items():
        print(f"{start}:")
        for part in runs[0]:
            wall, cpu = np.array([run[part] for run in runs]).T
            results.setdefault(start, {})[part] = {"wall": np.median(wall), "cpu": np.median(cpu)}
            shown = (f"{np.median(s):6.2f} [{s.min():.2f}, {s.max():.2f}]" for s in (wall, cpu))
            print(f"  {part:14}" + "".join(f"{text:24}" for text in shown).rstrip())
    if options.json:
        print(json.dumps({"machine": machine, "results": results}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one-start"]:
        began, file, *sys.argv[1:] = sys.argv[2:]
        one_start(float(began), file)
    else:
        main()
