"""What TensorBoard shows of a run: the numbers of its rounds, and its pictures."""

import struct
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedjax_bn.arguments.text import shown
from fedjax_bn.run.files.workdir import faults_named, sync


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


with hidden("torch"):  # where it is installed, seconds for the name of a type
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

_EVENTS = "the workdir's folder events"
_PNG = b"\x89PNG\r\n\x1a\n"


@contextmanager
def open_events(folder: Path, rounds_done: int) -> Iterator[EventsWriter]:
    """Opens a new event file for TensorBoard, one a start of the run.

    In the files of earlier starts, events behind `rounds_done` are of rounds that will come again:
    TensorBoard is told to drop them. The writer is the one below tensorboardX's `SummaryWriter`,
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


def write_events(writer: EventsWriter, record: dict[str, Any]) -> None:
    """Writes the numbers of one record of metrics.jsonl, tags such as `accuracy/mnist`."""
    with faults_named(_EVENTS):
        for tag, value in scalars(record):
            # not by tensorboardX's `scalar`, which makes one tag of "a b" and "a_b"
            one = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.write_event(Event(wall_time=time.time(), step=record["round"], summary=one))


def write_pictures(writer: EventsWriter, folder: Path, done: int) -> None:
    """Writes the pictures of a folder, *.png, as of the rounds that are done.

    Args:
      writer: TensorBoard's; a picture's tag is its name.
      folder: one without pictures, or that is not there, adds nothing.
      done: rounds.

    Raises:
      WorkdirError: the events cannot be written.
    """
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


def settle(writer: EventsWriter) -> None:
    """Waits until the disk has all events."""
    with faults_named(_EVENTS):
        writer.flush()


def scalars(record: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    """All (tag, number) pairs of a nested record but its round."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{shown(key)}/")
        elif isinstance(value, int | float) and prefix + key != "round":
            yield prefix + shown(key), float(value)
