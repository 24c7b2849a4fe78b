"""Reports rounds to Weights & Biases."""

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedjax_bn.training.callbacks.tensorboard import scalars_of
from fedjax_bn.training.experiment import Plan
from fedjax_bn.training.records import Record


class Wandb:
    """Logs each round's numbers to the project `plan.wandb`; a run that continues keeps its id.

    Args:
      plan: the run's.
      folder: the workdir, from whose path the id is made.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder, self._stack = plan, folder, ExitStack()

    def __enter__(self) -> "Wandb":
        import wandb

        place = self._folder.resolve()
        options = {
            "id": hashlib.sha256(str(place).encode()).hexdigest()[:16],
            "resume": "allow",
            "name": "/".join(place.parts[-2:]),
            "dir": str(self._folder),
        }
        run = wandb.init(project=self._plan.wandb, config=self._plan.keys, **options)
        self._run = self._stack.enter_context(run)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Logs the round."""
        del state
        self._run.log(dict(scalars_of(metrics)), step=round)
