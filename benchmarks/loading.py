"""Times decoding and caching of a folder of images, beside Pillow alone on the same cores.

    python benchmarks/loading.py --path PACS --json

"Pillow alone" opens every image, converts it to RGB, resizes it and throws it away, with as many
processes as there are cores, and with as many threads; the faster of the two counts, without the
start of the processes. The library lists the folders, decodes, writes the cache and checks labels
and lists; from cache it lists the folders, checks that no file has changed, and maps the pixels.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS, load_image_folders
from fedjax_bn.data.source import Source
from interleave import Samples, conclude, fastest, figures, interleave, paired_ratio, show
from machine import CORES, announce

READERS = {name: partial(load_image_folders, name) for name in IMAGE_FOLDERS}


def pillow(work: tuple[Sequence[Path], int]) -> int:
    """Decodes and resizes files; returns their number."""
    files, size = work
    for file in files:
        with Image.open(file) as image:
            np.asarray(image.convert("RGB").resize((size, size), Image.BILINEAR))
    return len(files)


def pillow_alone(workers: Executor, files: Sequence[Path], size: int) -> None:
    """Decodes all files, 64 at a time."""
    blocks = [(files[start : start + 64], size) for start in range(0, len(files), 64)]
    assert sum(workers.map(pillow, blocks)) == len(files)


def measure(name: str, path: Path, size: int, repeats: int, cache: Path) -> dict[str, Samples]:
    """Times decoding, caching and opening one dataset, and Pillow alone."""

    def read() -> Source:
        return READERS[name](path, image_size=size, cache=cache, progress=False)

    def before(run: str) -> None:
        if run == "decoding and caching":  # this run must find no cache; "from cache" finds it
            shutil.rmtree(cache, ignore_errors=True)
        elif run == "from cache":
            read()

    pools = read().pools
    root = next(base for base in (path, *path.iterdir()) if (base / pools[0].names[0]).exists())
    files = [root / name for pool in pools for name in pool.names]
    print(f"{len(files)} images")
    spawn = get_context("spawn")
    with ProcessPoolExecutor(CORES, spawn) as processes, ThreadPoolExecutor(CORES) as threads:
        runs = {
            "Pillow, processes": lambda: pillow_alone(processes, files, size),
            "Pillow, threads": lambda: pillow_alone(threads, files, size),
            "decoding and caching": read,
            "from cache": read,
        }
        return interleave(runs, repeats, before=before)


def main() -> None:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--name", choices=READERS, default="pacs")
    add("--path", type=Path, required=True, help="the folder of the images")
    add("--image-size", type=int, default=128)
    add("--repeats", type=int, default=9)
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    here = announce(
        f"{options.name} at {options.image_size} pixels beside Pillow alone on {CORES} cores; CPU "
        "seconds are this process's, without those of Pillow's processes",
        "pillow",
    )
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        taken = measure(options.name, options.path, options.image_size, options.repeats, cache)
    alone = fastest(taken, ("Pillow, processes", "Pillow, threads"))
    show(taken, alone)
    ratio = paired_ratio(taken["decoding and caching"], taken[alone])
    conclude(f"decoding and caching / {alone} (at most 2; from cache below 2 s)", ratio)
    if options.json:
        print(json.dumps({"machine": here, "results": figures(taken, alone)}))


if __name__ == "__main__":
    main()
