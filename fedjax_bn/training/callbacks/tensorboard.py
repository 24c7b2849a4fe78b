"""Writes the numbers and plots of a run where TensorBoard finds them."""

import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedjax_bn.arguments.text import shown
from fedjax_bn.training.records import Record
from fedjax_bn.training.workdir import faults_named, sync


class TensorBoard:
    """Writes a new event file into WORKDIR/events, with the numbers of each round and the plots."""

    def __init__(self, folder: Path, rounds_done: int, pictures: str = "*") -> None:
        self._folder, self._rounds_done = folder / "events", rounds_done
        self._plots = sorted((folder / "plots").glob(f"{pictures}.png"))

    def __enter__(self) -> "TensorBoard":
        # tensorboardX would import torch, for seconds, to name a type. None is Python's own mark
        # for "not found".
        hidden = {} if "torch" in sys.modules else {"torch": None}
        sys.modules.update(hidden)
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
        finally:
            for name in hidden:
                del sys.modules[name]
        self._event = Event
        with faults_named(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            # Names have the time in seconds, and files are read in the order of their names.
            # Not `SummaryWriter`, whose `flush` does not wait for what its thread has yet to write.
            self._writer = EventsWriter(str(self._folder / "events"), f".{self._rounds_done:08}")
            self._write(self._rounds_done + 1, session_log=SessionLog(status=SessionLog.START))
            sync(self._folder)
        for path in self._plots:
            if (data := path.read_bytes()).startswith(b"\x89PNG"):
                width, height = struct.unpack(">II", data[16:24])
                image = {"width": width, "height": height, "colorspace": 4}
                image["encoded_image_string"] = data
                value = {"tag": path.stem, "image": image}
                self._write(self._rounds_done, summary={"value": [value]})
        return self

    def __exit__(self, *error: Any) -> None:
        with faults_named(self._folder):
            self._writer.close()

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Writes the numbers of the record, with tags such as `accuracy/mnist`."""
        # Not by tensorboardX's `scalar`, which would give "a b" and "a_b" the same tag.
        for tag, number in scalars_of(metrics):
            self._write(round, summary={"value": [{"tag": tag, "simple_value": number}]})

    def flush(self) -> None:
        """Waits until the disk has all events."""
        with faults_named(self._folder):
            self._writer.flush()

    def _write(self, step: int, **content: Any) -> None:
        with faults_named(self._folder):
            self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))


def scalars_of(record: Record, prefix: str = "") -> Iterable[tuple[str, float]]:
    """Yields all (tag, number) pairs of a nested record except its round."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from scalars_of(value, f"{prefix}{shown(key)}/")
        elif isinstance(value, int | float) and prefix + key != "round":
            yield prefix + shown(key), float(value)
