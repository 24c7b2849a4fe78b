"""Reads a finished run of the command line into the `Result` that `simulate` returns."""

import os
from pathlib import Path

from fedjax_bn.run.config.trust import recorded_code
from fedjax_bn.run.files import finished
from fedjax_bn.training import workdir
from fedjax_bn.training.result import Result


def load_run(folder: str | os.PathLike[str], trust: bool = False) -> Result:
    """Returns a finished run of the command line, at its selected round, without its data.

        run = load_run("runs/quickstart")
        probabilities = run.predict(images, client="blueprint")  # as `evaluate --internal` tests it
        variables = run.variables("blueprint")

    Images have the stored form of the training images: `run.method.learned.prepare` standardizes
    them with the run's constants.

    Args:
      folder: the run's workdir.
      trust: whether to import code that the workdir names, such as a model of one's own, also from
        the folder where the run was started; without it only from folders on `PYTHONPATH`.

    Raises:
      arguments.errors.WorkdirError, arguments.errors.CheckpointError: the folder holds no
        finished run, or a damaged one.
      ValueError: the run names code that is not trusted, or something that does not exist.
    """
    folder = Path(folder)
    about = finished.read_about(folder)
    config = finished.remembered(about, trust)
    config.mesh.update(clients=1, batch=0)  # one device; the run's machine had others
    config.adaptations = ()
    with recorded_code(folder, about, trust=trust):
        experiment, state, number = finished.restore(folder, config, about["form"])
    lines = folder / "metrics.jsonl"  # what a Flower server has served has none
    history = workdir.read_lines(lines, number) if lines.exists() else []
    summary = workdir.read_json(folder / "summary.json", workdir.SUMMARY)
    return Result(experiment.method, state, tuple(about["form"]["clients"]), summary, history)
