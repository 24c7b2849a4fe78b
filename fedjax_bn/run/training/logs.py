"""Where a run's rounds are reported: TensorBoard, the terminal, Weights & Biases if configured."""

import hashlib
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedjax_bn.arguments.text import shown
from fedjax_bn.run.config.keys import flatten
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.files.workdir import faults_named, sync
from fedjax_bn.run.processes.together import first
from fedjax_bn.run.training.progress import progress
from fedjax_bn.run.training.records import Record
from fedjax_bn.run.training.summary import samples_a_round


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Lets `import name` fail within the block, as if it were not installed.

    A module that is there already stays; one that is imported after the block is the real one.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark for "not found"
    try:
        yield
    finally:
        del sys.modules[name]


with hidden("torch"):  # if it is installed, seconds for the name of a type
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

_EVENTS = "the workdir's folder events"
_PNG = b"\x89PNG\r\n\x1a\n"


class _Watchers(NamedTuple):
    """What to call after a round, and before a checkpoint that counts it."""

    tell: Callable[[Record], None]
    settle: Callable[[], None]


@contextmanager
def watchers(
    config: ConfigDict, experiment: Experiment, folder: Path, done: int
) -> Iterator[_Watchers]:
    """Opens all reports for the rounds that are left; only the first process has any.

    Args:
      config: the run's.
      experiment: what it names.
      folder: the workdir, whose plots are shown too.
      done: rounds done.

    Raises:
      WorkdirError: events cannot be written.
    """
    if not first():
        yield _Watchers(lambda record: None, lambda: None)
        return
    samples, score = samples_a_round(config, experiment), experiment.task.score.name
    with ExitStack() as stack:
        events = stack.enter_context(open_events(folder / "events", done))
        bar = progress(config.method, config.rounds, done, samples, score)
        told = [partial(write_events, events)]
        if config.wandb:
            told.append(stack.enter_context(_tracked(config, folder)))
        told.append(stack.enter_context(bar))
        _write_pictures(events, folder / "plots", done)

        def tell(record: Record) -> None:
            for one in told:
                one(record)

        def settle() -> None:
            with faults_named(_EVENTS):
                events.flush()

        yield _Watchers(tell, settle)


@contextmanager
def open_events(folder: Path, rounds_done: int) -> Iterator[EventsWriter]:
    """Opens a new event file for TensorBoard, one for each start of the run.

    Events of earlier files that are of rounds after `rounds_done`, which will come again, are
    marked for TensorBoard to drop. The writer is the one below tensorboardX's `SummaryWriter`,
    whose `flush` does not wait for what its thread has yet to write.

    Raises:
      WorkdirError: it cannot be written, here or when it is closed.
    """
    with faults_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Files are named by the second, and read in the order of their names.
        writer = EventsWriter(str(folder / "events"), f".{rounds_done:08}")
        start = SessionLog(status=SessionLog.START)
        writer.write_event(Event(wall_time=time.time(), step=rounds_done + 1, session_log=start))
        sync(folder)
    try:
        yield writer
    finally:
        with faults_named(folder):
            writer.close()


def write_events(writer: EventsWriter, record: Record) -> None:
    """Writes the numbers of one record of metrics.jsonl, with tags such as `accuracy/mnist`."""
    with faults_named(_EVENTS):
        for tag, value in scalars(record):
            # not by tensorboardX's `scalar`, which makes one tag of "a b" and "a_b"
            one = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.write_event(Event(wall_time=time.time(), step=record["round"], summary=one))


def _write_pictures(writer: EventsWriter, folder: Path, done: int) -> None:
    """Writes the pictures of a folder, *.png, as of the rounds that are done."""
    with faults_named(_EVENTS):
        for path in sorted(folder.glob("*.png")):
            data = path.read_bytes()
            if data[:8] != _PNG:
                continue
            width, height = struct.unpack(">II", data[16:24])
            form = {"width": width, "height": height, "colorspace": 4}
            image = Summary.Image(encoded_image_string=data, **form)
            one = Summary(value=[Summary.Value(tag=path.stem, image=image)])
            writer.write_event(Event(wall_time=time.time(), step=done, summary=one))


def scalars(record: Record, prefix: str = "") -> Iterable[tuple[str, float]]:
    """Yields all (tag, number) pairs of a nested record but its round."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{shown(key)}/")
        elif isinstance(value, int | float) and prefix + key != "round":
            yield prefix + shown(key), float(value)


@contextmanager
def _tracked(config: ConfigDict, folder: Path) -> Iterator[Callable[[Record], Any]]:
    """Reports rounds to the project `config.wandb`, where a run that continues has the same id."""
    import wandb

    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    name = "/".join(folder.resolve().parts[-2:])
    options = {"id": identity, "resume": "allow", "name": name, "dir": str(folder)}
    with wandb.init(project=config.wandb, config=dict(flatten(config)), **options) as there:
        yield lambda record: there.log(dict(scalars(record)), step=record["round"])
