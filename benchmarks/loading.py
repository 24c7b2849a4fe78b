"""Time to decode and cache a folder of images, beside what Pillow alone needs on the same cores.

    python benchmarks/loading.py --path ../shared/data/pacs --json

"Pillow alone" opens every image, converts it to RGB, resizes it and throws it away, by as many
processes as there are cores, and by as many threads; the faster of the two counts, without the time
that processes need to start. The library lists the folders, decodes, writes the cache and checks
labels and lists; from cache it lists, checks that no file has changed, and maps the pixels.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import numpy as np
import PIL
from PIL import Image

sys.path.append(str(Path(__file__).parents[1]))

from fedjax_bn.data.sets import domainnet
from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS, load
from fedjax_bn.data.source import Source

READERS = {name: partial(load, name) for name in IMAGE_FOLDERS} | {"domainnet": domainnet.load}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def pillow(work: tuple[Sequence[Path], int]) -> int:
    """Decodes and resizes files; returns how many."""
    files, size = work
    for file in files:
        with Image.open(file) as image:
            np.asarray(image.convert("RGB").resize((size, size), Image.BILINEAR))
    return len(files)


def pillow_alone(workers: Executor, files: Sequence[Path], size: int) -> None:
    """All files, 64 at a time."""
    blocks = [(files[start : start + 64], size) for start in range(0, len(files), 64)]
    assert sum(workers.map(pillow, blocks)) == len(files)


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(
    runs: dict[str, Callable[[], object]], before: Callable[[str], None], repeats: int
) -> dict[str, float]:
    """Medians of all runs, which take turns after a warm-up; prints them with their spread."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            before(name)
            times[name].append(seconds(run))
    for name, column in times.items():
        least, *_, most = sorted(column[1:])
        print(f"{name:<24}{median(column[1:]):7.2f} s [{least:.2f}, {most:.2f}]")
    return {name: median(column[1:]) for name, column in times.items()}


def compare(name: str, path: Path, size: int, repeats: int, cache: Path) -> dict[str, float]:
    """Measures decoding, caching and opening one dataset; returns the figures of `--json`."""

    def read() -> Source:
        return READERS[name](path, image_size=size, cache=cache, progress=False)

    def before(run: str) -> None:
        if run == "decoding and caching":  # so this run finds no cache, and the next one finds it
            shutil.rmtree(cache, ignore_errors=True)

    pools = read().pools
    root = next(base for base in (path, *path.iterdir()) if (base / pools[0].names[0]).exists())
    files = [root / name for pool in pools for name in pool.names]
    spawn = get_context("spawn")
    with ProcessPoolExecutor(CORES, spawn) as processes, ThreadPoolExecutor(CORES) as threads:
        runs = {
            "Pillow, processes": lambda: pillow_alone(processes, files, size),
            "Pillow, threads": lambda: pillow_alone(threads, files, size),
            "decoding and caching": read,
            "from cache": read,
        }
        figures = measure(runs, before, repeats)
    alone = min(figures["Pillow, processes"], figures["Pillow, threads"])
    fresh = figures["decoding and caching"]
    return {
        "images": len(files),
        "pillow_seconds": round(alone, 3),
        "decode_and_cache_seconds": round(fresh, 3),
        "from_cache_seconds": round(figures["from cache"], 3),
        "ratio_to_pillow": round(fresh / alone, 3),
    }


def main() -> None:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", choices=READERS, default="pacs")
    parser.add_argument("--path", type=Path, default=Path("../shared/data/pacs"))
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {CORES} cores, Pillow {PIL.__version__}, {options.name} at "
        f"{options.image_size}; median [min, max] of {options.repeats}"
    )
    with tempfile.TemporaryDirectory() as folder:
        figures = compare(
            options.name, options.path, options.image_size, options.repeats, Path(folder, "cache")
        )
    print(
        f"{figures['images']} images: decoding and caching takes {figures['ratio_to_pillow']:.2f} "
        "times what Pillow alone needs (target: at most 2; from cache below 2 s)"
    )
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
