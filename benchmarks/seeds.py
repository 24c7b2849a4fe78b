"""Measures the quickstart's methods over seeds: mean, standard deviation, margin by seed.

    python benchmarks/seeds.py --seeds 5 --workdir runs/seeds

A seed determines which client has which scan, the scanners' noise, the initial weights and the
batches. A run that was stopped continues; finished seeds are read from the workdir.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from configs.quickstart import get_config
from fedjax_bn.run import train
from fedjax_bn.run.train import runs
from fedjax_bn.training.score_tables import comparison


def main() -> None:
    """Runs all seeds and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workdir", type=Path, default=Path("runs/seeds"))
    options = parser.parse_args()
    rows: dict[str, list[dict]] = {}
    for seed in range(options.seeds):
        for config, folder in runs(get_config(f"seed={seed}"), options.workdir / str(seed)):
            summary = train.run(config, folder, say=lambda text: None)
            rows.setdefault(config.method, []).append(summary)
    print(comparison([*rows.values()]))
    means = {m: [s["accuracy"]["internal"]["mean"] for s in seeds] for m, seeds in rows.items()}
    first, *others = means
    for other in others:
        gaps = np.subtract(means[first], means[other])
        print(
            f"clients' mean, {first} - {other}: {np.mean(gaps):.1f} ({np.std(gaps, ddof=1):.1f}); "
            f"by seed {', '.join(f'{gap:.1f}' for gap in gaps)}"
        )


if __name__ == "__main__":
    main()
