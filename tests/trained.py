"""What test_processes.py starts several times: one process of several that train the tiny data."""

import sys
from pathlib import Path

import runs
from fedjax_bn import main
from fedjax_bn.run import errors, train
from fedjax_bn.run.distributed import join
from fedjax_bn.run.experiment import DATASETS
from fedjax_bn.run.processes import together
from fedjax_bn.run.report import plots
from fedjax_bn.run.stop import listen

TRAINED = {
    "rounds": 2,
    "eval_every": 1,
    "checkpoint_every": 1,
    "adaptations": ("running", "tsmobn"),
    "adapt_batch_size": 4,
    "compilation_cache": "",
}


def run() -> None:
    """Trains in the folder that is the last but one argument, for the last one's rounds."""
    listen()
    join("--distributed" in sys.argv, timeout=100)
    DATASETS["tiny"] = lambda config: runs.DATA
    plots.samples = lambda domains: b""
    config = runs.config(**TRAINED | {"mesh": "auto", "rounds": int(sys.argv[-1])})
    try:
        with together():
            train.run(config, Path(sys.argv[-2]))
    except errors.UserError as error:
        main.fail(str(error))


if __name__ == "__main__":
    run()
