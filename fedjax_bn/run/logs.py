"""What a run reports while it goes: the progress bar, TensorBoard's events."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tqdm import tqdm


def open_events(folder: Path, records: list[dict[str, Any]]) -> SummaryWriter:
    """Opens a new event file for TensorBoard that begins with the rounds done so far.

    The files of earlier starts are removed: a killed run loses the events that it had not flushed,
    and may hold events of rounds that will come again.
    """
    for file in folder.glob("events.out.tfevents.*"):
        file.unlink()
    writer = SummaryWriter(str(folder))
    for record in records:
        write_events(writer, record)
    return writer


def write_events(writer: SummaryWriter, record: dict[str, Any]) -> None:
    """Writes the numbers of one record of metrics.jsonl, tags such as `accuracy/mnist`."""
    for tag, value in scalars(record):
        writer.add_scalar(tag, value, record["round"])


def scalars(record: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    """All (tag, number) pairs of a nested record but its round."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and prefix + key != "round":
            yield prefix + key, float(value)


def progress(title: str, rounds: int, done: int) -> tqdm:
    """A progress bar over rounds, on standard error."""
    return tqdm(total=rounds, initial=done, desc=title, unit="round", dynamic_ncols=True)


def progress_text(record: dict[str, Any]) -> str:
    """The end of the progress bar: mean loss, and mean accuracy where it was just measured."""
    losses = [value for value in record["loss"].values() if value is not None]
    text = f"loss {sum(losses) / max(len(losses), 1):.3f}"
    if "accuracy" in record:
        text += f", accuracy {record['accuracy']['mean']:.1f} %"
    return text
