"""Who is told of a run's rounds: TensorBoard, the terminal, Weights & Biases if it is asked for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from fedjax_bn.run.config.keys import flatten
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.processes.together import first
from fedjax_bn.run.training import logs
from fedjax_bn.run.training.progress import progress
from fedjax_bn.run.training.records import Record
from fedjax_bn.run.training.summary import samples_a_round
from fedjax_bn.run.training.tracking import tracked


class Watchers(NamedTuple):
    """What to call behind a round, and before a checkpoint that counts it."""

    tell: Callable[[Record], None]
    settle: Callable[[], None]


@contextmanager
def watchers(
    config: ConfigDict, experiment: Experiment, folder: Path, done: int
) -> Iterator[Watchers]:
    """Opens them for the rounds that are left; in other processes than the first nobody is told.

    Args:
      config: the run's.
      experiment: what it names.
      folder: the workdir, whose plots are shown too.
      done: rounds done.

    Raises:
      WorkdirError: events cannot be written.
    """
    if not first():
        yield Watchers(lambda record: None, lambda: None)
        return
    pace = partial(progress, config.method, config.rounds, done)
    with (
        logs.open_events(folder / "events", done) as events,
        pace(samples_a_round(config, experiment), experiment.task.score.name) as tell_terminal,
        tracked(config.wandb, folder, dict(flatten(config))) as track,
    ):
        logs.write_pictures(events, folder / "plots", done)

        def tell(record: Record) -> None:
            logs.write_events(events, record)
            track(record)
            tell_terminal(record)

        yield Watchers(tell, partial(logs.settle, events))
