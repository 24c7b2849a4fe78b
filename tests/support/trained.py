"""What test_checkpoints.py starts several times: one of several processes on the tiny data."""

import json
import os
import sys
from pathlib import Path

from absl import logging

import runs
from fedjax_bn import main
from fedjax_bn.arguments import errors
from fedjax_bn.run import train
from fedjax_bn.run.experiment.build import DATASETS
from fedjax_bn.training import plots
from fedjax_bn.training.processes import any_asked, by_first, join, require_same

TRAINED = {
    "rounds": 2,
    "eval_every": 1,
    "checkpoint_every": 1,
    "adaptations": ("running",),
    "adapt_batch_size": 4,
    "compilation_cache": "",
}
# Three of four clients train, so that a row is padding.
COHORT = {"target": "", "adaptations": (), "clients_per_round": 3}
HOST = COHORT | {"population": "host"}
WAYS = {
    "all": {},
    "adapting": {"adaptations": ("running", "tsmobn"), "profile": 2},
    "sampled": COHORT | {"eval_clients": 3},
    "host": HOST | {"method": "scaffold", "eval_clients": 3},
    "host, adapting": HOST | {"method": "perfedavg", "personalize_samples": 3},
    "host, validating": HOST | {"local_selection": 2, "participation": "uniform:dropout=0.3"},
}


# Each takes from 0.2 to 4 seconds, and training needs none of them before its first round.
NOT_NEEDED = {"torch", "tensorflow", "flax.nnx", "scipy.ndimage", "sklearn", "grain", "h5py"}


def talk() -> list:
    """What a process learns of the other one, and what it imports that it does not need."""
    number = os.environ["JAX_PROCESS_ID"]

    def refuse() -> None:
        raise errors.WorkdirError("é" * 300)

    def refusal(act, *arguments) -> str:
        try:
            return act(*arguments)
        except errors.UserError as error:
            return f"{type(error).__name__}: {error}"

    return [
        by_first(lambda: {"a": [number, "ü" * 999]}),
        refusal(by_first, refuse),
        [any_asked(asked) for asked in (False, number == "1")],
        require_same("the data", {"b": 1}),
        refusal(require_same, "the data", number),
        sorted(NOT_NEEDED & set(sys.modules)),
    ]


def run() -> None:
    """Trains as the last arguments say: a folder, the number of rounds, and one of `WAYS`."""
    folder, rounds, way = Path(sys.argv[-3]), *sys.argv[-2:]
    logging.set_verbosity(logging.FATAL)  # as `main.main` does
    join("--distributed" in sys.argv, timeout=100)
    if way == "all":
        said = json.dumps(talk())
        folder.with_name("said" + os.environ["JAX_PROCESS_ID"]).write_text(said)
    DATASETS["tiny"] = lambda config: runs.DATA
    plots.samples = lambda domains, **options: b""
    config = runs.config(**TRAINED | WAYS[way] | {"mesh.clients": 0, "rounds": int(rounds)})
    try:
        train.run(config, folder)
    except errors.UserError as error:
        main.fail(str(error))


if __name__ == "__main__":
    run()
