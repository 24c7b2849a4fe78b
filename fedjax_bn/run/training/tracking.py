"""Weights & Biases, for those who name a project of theirs in `config.wandb`."""

import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedjax_bn.run.errors import ConfigError


def check_tracking(project: str) -> None:
    """Raises ConfigError where a project is named and the package is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"config.wandb={project!r} needs the package wandb, which is not installed: "
            "`pip install wandb`, or leave it empty and see the run in TensorBoard"
        )


@contextmanager
def tracked(
    project: str, folder: Path, config: dict[str, Any]
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Reports rounds to a project; a run that goes on, goes on there too.

    Args:
      project: a name of Weights & Biases; "" reports nothing.
      folder: the workdir, by whose path the run is known there.
      config: keys and values of the run.

    Yields:
      A function of a round's record, a line of metrics.jsonl.
    """
    if not project:
        yield lambda record: None
        return
    import wandb

    from fedjax_bn.run.training.logs import scalars  # whose TensorBoard takes long to import

    known = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    name = "/".join(folder.resolve().parts[-2:])
    options = {"id": known, "resume": "allow", "name": name, "dir": str(folder)}
    with wandb.init(project=project, config=config, **options) as there:
        yield lambda record: there.log(dict(scalars(record)), step=record["round"])
