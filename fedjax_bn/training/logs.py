"""Reports a run's rounds: to the terminal, TensorBoard and, if configured, Weights & Biases."""

import hashlib
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fedjax_bn.arguments.text import shown
from fedjax_bn.training.experiment import Experiment, Plan
from fedjax_bn.training.records import Record, samples_a_round
from fedjax_bn.training.together import first
from fedjax_bn.training.workdir import faults_named, sync

_EVENTS = "the workdir's folder events"
_PNG = b"\x89PNG\r\n\x1a\n"
_BETWEEN_LINES = 30.0  # seconds; an evaluated round always prints a line
# Leaves out tqdm's percentage and rounds per second, so that the text fits into 80 columns, and its
# time left, which counts compiling.
_BAR = "{{desc}}: {{bar}} {{n_fmt}}/{{total_fmt}} [{{elapsed}}<{left}{{postfix}}]"


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Lets `import name` fail within the block, as if the package were not installed.

    A module that is already imported stays. After the block, the real one can be imported.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark for "not found"
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def watchers(
    experiment: Experiment, folder: Path, done: int
) -> Iterator[tuple[Callable[[Record], None], Callable[[], None]]]:
    """Opens all reports for the remaining rounds; only the first process has any.

    Args:
      experiment: the run's.
      folder: the workdir, whose plots are shown too.
      done: rounds done.

    Yields:
      `report(record)`, to call after each round, and `settle()`, to call before a checkpoint.

    Raises:
      WorkdirError: events cannot be written.
    """
    if not first():
        yield lambda record: None, lambda: None
        return
    plan, samples = experiment.plan, samples_a_round(experiment)
    with ExitStack() as stack:
        events = stack.enter_context(_open_events(folder / "events", done))
        reports = [partial(_write_events, events)]
        if plan.wandb:
            reports.append(stack.enter_context(_tracked(plan, folder)))
        bar = progress(plan.method, plan.rounds, done, samples, experiment.task.score.name)
        reports.append(stack.enter_context(bar))
        _write_pictures(events, (folder / "plots").glob("*.png"), done)

        def report(record: Record) -> None:
            for one in reports:
                one(record)

        def settle() -> None:
            with faults_named(_EVENTS):
                events.flush()

        yield report, settle


@contextmanager
def progress(
    title: str, rounds: int, done: int, samples: float, score: str = "accuracy"
) -> Iterator[Callable[[Record], None]]:
    """Shows each round on standard error: a bar on a terminal, elsewhere plain lines.

    Each round shows its mean loss, its mean score if it was evaluated, its pace and the time left.

    Args:
      title: of the run, such as its method.
      rounds: of the whole run.
      done: rounds done before.
      samples: training samples of a round, for the pace.
      score: what the run calls its accuracy.

    Yields:
      A function to call with each round's record, a line of metrics.jsonl.
    """
    title, left = shown(title), _time_left(rounds)
    if not sys.stderr.isatty():
        printed = time.monotonic()

        def print_line(record: Record) -> None:
            nonlocal printed
            number, seconds, now = record["round"], left(record), time.monotonic()
            if "accuracy" in record or number >= rounds or now - printed >= _BETWEEN_LINES:
                printed = now
                text = f"{_in_words(record, samples, score)}, {_duration(seconds)} left"
                with suppress(OSError):
                    line = f"{title}: round {number} of {rounds}, {text}"
                    print(line, file=sys.stderr, flush=True)

        yield print_line
        return
    shape = _BAR.format(left="?")
    with tqdm(total=rounds, initial=done, desc=title, bar_format=shape, dynamic_ncols=True) as bar:

        def move(record: Record) -> None:
            bar.bar_format = _BAR.format(left=tqdm.format_interval(left(record)))
            bar.set_postfix_str(_in_words(record, samples, score), refresh=False)
            bar.update()

        yield move


def _time_left(rounds: int) -> Callable[[Record], float]:
    """Returns `left(record)`, the estimated seconds of the rounds that follow the record's.

    The estimate is the mean time between rounds, without the first round and the first evaluated
    one, which compile. Until there are others, it is the round's own time.
    """
    seen, paces, before = set(), [], time.monotonic()

    def left(record: Record) -> float:
        nonlocal before
        kind, now = "accuracy" in record, time.monotonic()
        if kind in seen:
            paces.append(now - before)
        seen.add(kind)
        before = now
        pace = sum(paces) / len(paces) if paces else record["seconds"]
        return pace * (rounds - record["round"])

    return left


def _in_words(record: Record, samples: float, score: str) -> str:
    """Returns a round in words: mean loss, the score if it was evaluated, samples a second."""
    losses = record["loss"]
    losses = {"mean": losses["mean"]} if "mean" in losses else losses  # a summary of many clients
    present = [loss for loss in losses.values() if loss is not None]
    text = f"loss {sum(present) / len(present):.3f}" if present else "no client took part"
    if "accuracy" in record:
        text += f", {score} {record['accuracy']['mean']:.1f} %"
    if not present:
        return text
    return f"{text}, {samples / max(record['seconds'], 1e-9):,.0f} samples/s"


def _duration(seconds: float) -> str:
    """Returns seconds as people write them: 8 s, 3 min 20 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextmanager
def _open_events(folder: Path, rounds_done: int) -> Iterator[Any]:
    """Opens a new event file for TensorBoard, one for each start of the run.

    TensorBoard drops events of earlier files for rounds after `rounds_done`, which will be written
    again. The writer is tensorboardX's `EventsWriter`, because the `flush` of its `SummaryWriter`
    does not wait for what its thread has yet to write.
    """
    with hidden("torch"):  # tensorboardX would import it, for seconds, to name a type
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
    with faults_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Names have the time in seconds, and files are read in the order of their names.
        writer = EventsWriter(str(folder / "events"), f".{rounds_done:08}")
        start = SessionLog(status=SessionLog.START)
        writer.write_event(Event(wall_time=time.time(), step=rounds_done + 1, session_log=start))
        sync(folder)
    try:
        yield writer
    finally:
        with faults_named(folder):
            writer.close()


def _write_events(writer: Any, record: Record) -> None:
    """Writes the numbers of one record of metrics.jsonl, with tags such as `accuracy/mnist`."""
    # Not by tensorboardX's `scalar`, which would give "a b" and "a_b" the same tag.
    for tag, value in _scalars(record):
        _write_value(writer, record["round"], tag=tag, simple_value=value)


def show_pictures(folder: Path, name: str, done: int) -> None:
    """Writes a plot of a finished run, plots/NAME.png of a workdir, as an event of its last round.

    Raises:
      WorkdirError: events cannot be written.
    """
    with _open_events(folder / "events", done) as events:
        _write_pictures(events, (folder / "plots").glob(f"{name}.png"), done)


def _write_pictures(writer: Any, paths: Iterable[Path], done: int) -> None:
    """Writes pictures, *.png, as events of the last round done."""
    for path in sorted(paths):
        data = path.read_bytes()
        if data[:8] == _PNG:
            width, height = struct.unpack(">II", data[16:24])
            form = {"width": width, "height": height, "colorspace": 4}
            image = {"encoded_image_string": data} | form
            _write_value(writer, done, tag=path.stem, image=image)


def _write_value(writer: Any, step: int, **value: Any) -> None:
    from tensorboardX.proto.event_pb2 import Event

    with faults_named(_EVENTS):
        event = Event(wall_time=time.time(), step=step, summary={"value": [value]})
        writer.write_event(event)


def _scalars(record: Record, prefix: str = "") -> Iterable[tuple[str, float]]:
    """Yields all (tag, number) pairs of a nested record except its round."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{shown(key)}/")
        elif isinstance(value, int | float) and prefix + key != "round":
            yield prefix + shown(key), float(value)


@contextmanager
def _tracked(plan: Plan, folder: Path) -> Iterator[Callable[[Record], Any]]:
    """Reports rounds to Weights & Biases; a run that continues keeps its id."""
    import wandb

    place = folder.resolve()
    identity = hashlib.sha256(str(place).encode()).hexdigest()[:16]
    options = {"id": identity, "resume": "allow", "name": "/".join(place.parts[-2:])}
    with wandb.init(project=plan.wandb, config=plan.keys, dir=str(folder), **options) as there:
        yield lambda record: there.log(dict(_scalars(record)), step=record["round"])
