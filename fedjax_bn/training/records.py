"""Makes the records of a run: lines of metrics.jsonl, the selected round, the summary."""

from statistics import median
from typing import Any

import numpy as np

from fedjax_bn.arguments.errors import NotFiniteError, RiskError, WorkdirError
from fedjax_bn.data.domain import scored_part
from fedjax_bn.engine.extrapolation import check_risks
from fedjax_bn.training.evaluation.groups import by_client
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.workdir import Record

_FAR = 10.0  # times the median; clients that differ in their features stay below 3


def round_record(
    names: list[str],
    metrics: dict[str, np.ndarray],
    number: int,
    seconds: float,
    limit: int = 100,
) -> Record:
    """Returns one line of metrics.jsonl; a client that did not take part has the loss None.

    Where the norms of the clients' updates are known, they are in `norm`, and `far_norms` has those
    above ten times the median norm, as multiples of it; None for a norm that overflows.

    With more than `limit` clients the line has a summary (`run.evaluation.groups`) and, if not all
    took part, `clients`, the numbers of those that did.

    Args:
      names: of the K clients.
      metrics: of the round, as a method's `round` returns them.
      number: of the round, from 1.
      seconds: how long it took.
      limit: the configuration's `clients_named`.
    """
    record = {
        "round": number,
        "loss": by_client(names, metrics["loss"], limit, mean=False),
        "weights": by_client(names, metrics["weights"], limit, mean=False),
        "seconds": seconds,
    }
    # A client with a loss that is not finite took part only if its update is not finite either.
    took_part = np.isfinite(metrics["loss"]) | ~metrics["finite"]
    if "norm" in metrics:
        record["norm"] = by_client(names, metrics["norm"], limit, mean=False)
        record |= _far_norms(names, np.asarray(metrics["norm"], float))
    if len(names) > limit and not took_part.all():
        record["clients"] = np.flatnonzero(took_part).tolist()
    if not metrics["finite"].all():
        record["not_finite"] = [n for n, ok in zip(names, metrics["finite"], strict=True) if not ok]
    if not metrics["server_finite"]:
        record["server_finite"] = False
    return record


def _far_norms(names: list[str], norms: np.ndarray) -> Record:
    """Returns {"far_norms": {client: multiple of the median norm}}; {} if all norms are near it."""
    finite = norms[~np.isnan(norms)]
    middle = float(np.median(finite)) if len(finite) > 2 else 0.0
    far = np.flatnonzero(norms > _FAR * middle) if middle else []
    times = {names[k]: float(norms[k] / middle) for k in far}
    # None, because JSON has no infinite numbers.
    multiples = {name: x if np.isfinite(x) else None for name, x in times.items()}
    return {"far_norms": multiples} if multiples else {}


def warnings_of(record: Record) -> list[str]:
    """Returns warnings: a round without weights, and each norm that is far from the others'."""
    round = f"round {record['round']}: "
    idle = [] if any(record["weights"].values()) else ["no client counts: the shared leaves stay"]
    norms = [
        f"the norm of {name}'s update "
        + ("overflows" if times is None else f"is {times:.3g} times the median norm")
        for name, times in record.get("far_norms", {}).items()
    ]
    return [round + warning for warning in idle + norms]


def have_trained(records: list[Record], names: list[str]) -> np.ndarray:
    """Returns bool[K], which clients have trained in at least one round, with a finite update.

    Args:
      records: of all rounds so far.
      names: of the K clients.
    """
    number = {name: k for k, name in enumerate(names)}
    trained = np.zeros(len(names), bool)
    for record in records:
        participants = np.ones(len(names), bool)
        if "clients" in record:
            participants = np.isin(np.arange(len(names)), record["clients"])
        elif names[0] in record["loss"]:
            participants = np.array([record["loss"].get(name) is not None for name in names])
        participants[[number[name] for name in record.get("not_finite", ())]] = False
        trained |= participants
    return trained


def require_usable(
    record: Record, metrics: dict[str, np.ndarray], names: list[str], on_nonfinite: str
) -> None:
    """Raises an error if the run cannot continue after a round.

    Args:
      record: of the round.
      metrics: of the round, as a method's `round` returns them.
      names: of the K clients.
      on_nonfinite: the configuration's. With "drop", clients whose update is not finite are left
        out if others remain, and so is a server's step that is not finite. With "stop", either
        raises an error.

    Raises:
      NotFiniteError: an update of a client or the server's step is not finite.
      RiskError: the rule cannot use a risk, or gave weights that are not finite.
    """
    round, failed = f"round {record['round']}", ", ".join(record.get("not_finite", ()))
    lower = f"{round}: the update of {failed} is not finite; lower "
    counts = np.isfinite(metrics["loss"]) & metrics["finite"]
    if failed and not counts.any():
        raise NotFiniteError(
            f"{lower}optimizer.learning_rate or look at the data: no other client took part, so "
            "the round has no update (on_nonfinite=drop leaves out some clients, not all)"
        )
    if failed and on_nonfinite == "stop":
        raise NotFiniteError(
            f"{lower}optimizer.learning_rate, look at that client's data, or set "
            "on_nonfinite=drop to leave such clients out of a round's mean"
        )
    if "server_finite" in record and on_nonfinite == "stop":
        raise NotFiniteError(
            f"{round}: the server's step is not finite; lower its learning rate "
            "(the method's key eta), or set on_nonfinite=drop to leave such steps out"
        )
    if not np.isfinite(metrics["weights"]).all():
        try:
            check_risks(counts, metrics["risk"], names)
        except ValueError as error:
            raise RiskError(f"{round}: {error}") from error
        raise RiskError(f"{round}: the weighing rule gave weights that are not finite")


def select_round(records: list[Record]) -> int:
    """Returns the evaluated round with the best mean validation accuracy, the first if several are.

    `config.validate_with` chooses whose models are validated. Without a validation split, this is
    the last evaluated round. Over Flower, some rounds may be evaluated without validation samples.
    """
    validated = [record for record in records if "validation" in record]
    if validated:
        return max(validated, key=lambda record: record["validation"]["mean"])["round"]
    return [record["round"] for record in records if "accuracy" in record][-1]


def out_of_patience(records: list[Record], patience: int) -> bool:
    """Returns whether the last round was evaluated, `patience` or more rounds after the best one.

    Args:
      records: of all rounds so far.
      patience: `config.patience`; with 0 the result is False.
    """
    if not patience or not records or "validation" not in records[-1]:
        return False
    return records[-1]["round"] - select_round(records) >= patience


def summarize(
    experiment: Experiment, records: list[Record], compile_seconds: float, **entries: Any
) -> Record:
    """Returns the content of summary.json; accuracies are percentages, or mAPs of a detector.

    `rounds` counts the rounds that were made, fewer than planned if the run ran out of patience
    (`stopped_early`). `seconds_per_round` is the median over all rounds, `samples_per_second` the
    training samples of a round divided by that, and `compile_seconds` the time of the last start, 0
    if no round was left. `tested_on` is the part of the samples that the accuracies are of, see
    `data.domain.scored_part`.

    Args:
      experiment: the run's.
      records: of all rounds, in order.
      compile_seconds: how long the program of a round took to compile.
      **entries: further entries, such as `traffic={...}`.
    """
    plan, selected = experiment.plan, select_round(records)
    best, seconds = records[selected - 1], median(record["seconds"] for record in records)
    tested_on = {"internal": scored_part(experiment.internal.domains)}
    if experiment.unseen:
        tested_on["unseen"] = scored_part(experiment.unseen)
    measures = {}
    if "measures" in best:
        outside = best.get("unseen_measures", {})
        measures = {"measures": {"internal": best["measures"], "unseen": outside}}
    return {
        "method": plan.method,
        "dataset": experiment.internal.name,
        "seed": plan.seed,
        "rounds": len(records),
        "selected_round": selected,
        "tested_on": tested_on,
        "accuracy": _accuracies(best),
        "last_round": _accuracies(records[-1]),
        **measures,
        "seconds_per_round": seconds,
        "compile_seconds": compile_seconds,
        "samples_per_second": samples_a_round(experiment) / seconds,
        **({} if experiment.task.classifies else {"score": experiment.task.score.name}),
        **({"stopped_early": len(records) < plan.rounds} if plan.patience else {}),
        **entries,
    }


def _accuracies(record: Record) -> Record:
    """Returns the accuracies of one evaluated round: {"internal": ..., "unseen": ...}."""
    if "accuracy" not in record:  # the line was edited
        raise WorkdirError(
            f"metrics.jsonl has no accuracies of round {record['round']}, which was evaluated: "
            "move the workdir away and start again, or give another --workdir"
        )
    return {"internal": record["accuracy"], "unseen": record.get("unseen", {})}


def samples_a_round(experiment: Experiment) -> float:
    """Returns the mean number of samples that a round trains on, for clients of mean size."""
    work, who = experiment.work, experiment.participation
    sizes = [len(domain.train.images) for domain in experiment.internal.domains]
    total = len(sizes)
    if work.steps:
        samples = total * work.steps * work.batch_size
    else:
        samples = int(np.dot(np.broadcast_to(work.epochs, total), sizes))
    present = who.drawn or total
    if who.trace is not None:
        available = np.unpackbits(who.trace, axis=1, count=total).sum(1)
        present = np.minimum(available, present).mean()
    return samples * float(present * (1 - who.dropout)) / total
