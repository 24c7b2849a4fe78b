"""What test_processes.py starts several times: one process of several that train the tiny data."""

import sys
from pathlib import Path

from absl import logging

import runs
from fedjax_bn import main
from fedjax_bn.arguments import errors
from fedjax_bn.run import train
from fedjax_bn.run.experiment.build import DATASETS
from fedjax_bn.training import plots
from fedjax_bn.training.together import join

TRAINED = {
    "rounds": 2,
    "eval_every": 1,
    "checkpoint_every": 1,
    "adaptations": ("running",),
    "adapt_batch_size": 4,
    "compilation_cache": "",
    "profile": 2,
}
# Three of four clients train, so that a row is padding.
COHORT = {"target": "", "adaptations": (), "clients_per_round": 3}
HOST = COHORT | {"population": "host"}
WAYS = {
    "all": {},
    "adapting": {"adaptations": ("running", "tsmobn")},
    "sampled": COHORT | {"eval_clients": 3},
    "host": HOST | {"method": "scaffold", "eval_clients": 3},
    "host, adapting": HOST | {"method": "perfedavg", "personalize_samples": 3},
    "host, validating": HOST | {"local_selection": 2, "participation__dropout": 0.3},
}


def run() -> None:
    """Trains as the last arguments say: a folder, the number of rounds, and one of `WAYS`."""
    folder, rounds, way = sys.argv[-3:]
    logging.set_verbosity(logging.FATAL)  # as `main.main` does
    join("--distributed" in sys.argv, timeout=100)
    DATASETS["tiny"] = lambda config: runs.DATA
    plots.samples = lambda domains, **how: b""
    config = runs.config(**TRAINED | WAYS[way] | {"mesh.clients": 0, "rounds": int(rounds)})
    try:
        train.run(config, Path(folder))
    except errors.UserError as error:
        main.fail(str(error))


if __name__ == "__main__":
    run()
