"""Draws samples of a data set, and counts the samples of each client, without training.

    python launch/pictures.py --config CONFIG [--config.KEY=VALUE ...] --workdir DIR

Writes the same files as a run: DIR/plots/samples.png with ten samples of each client and unseen
domain, DIR/plots/class_counts.png, and DIR/data.json. Prints each domain's samples by class.

    TsmoBN's Fig. E.1    --config configs/digits_dg.py
    TsmoBN's Fig. E.2    --config configs/cifar10_c.py
    TsmoBN's Fig. E.6    --config configs/cifar10_c.py --config.target=
                         --config.data.domains=speckle_noise,gaussian_blur,spatter,saturate
    UniFed's Fig. 4      --config configs/camelyon17.py
    FedBN's Table 10     --config configs/abide.py --config.data.name=abide:window=0    (subjects)
                         --config configs/abide.py    (windows: divided by the subjects this gives
                         the overlapping truncations of a subject, 31 fewer than its frames)

Each of them needs --config.data.path=PATH; --config.data.image_size=32 reads CIFAR-10-C faster.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from fedjax_bn.arguments.errors import UserError  # noqa: E402
from fedjax_bn.arguments.text import shown  # noqa: E402
from fedjax_bn.run.config.file import read, split_changes  # noqa: E402
from fedjax_bn.run.experiment.datasets import configured_clients, read_data  # noqa: E402
from fedjax_bn.training.plots import data_facts, write_data_plots  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draws samples of a data set.", allow_abbrev=False)
    parser.add_argument("--config", required=True, help="a config, as for fedjax_bn.main")
    parser.add_argument("--workdir", type=Path, required=True, help="folder that is written")
    try:
        changes, others = split_changes(sys.argv[1:] if arguments is None else arguments)
        options = parser.parse_args(others)
        config = read(options.config, changes)
        internal, unseen = configured_clients(read_data(config), config)
        write_data_plots(options.workdir, internal, unseen)
    except (UserError, ValueError, OSError) as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 2
    facts = data_facts(internal, (*internal.domains, *unseen))
    for name, counts in facts["unseen"].items():
        classes = zip(facts["classes"], counts["test"]["classes"], strict=True)
        by_class = ", ".join(f"{shown(label)} {count}" for label, count in classes)
        print(f"{shown(name)}: {counts['test']['samples']} samples: {by_class}")
    print(f"data.json and plots are in {options.workdir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
