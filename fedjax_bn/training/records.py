"""Makes the records of a run: lines of metrics.jsonl, the selected round, the summary."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from fedjax_bn.data.domain import scored_part
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.workdir import Record

QUANTILES = {"min": 0, "q10": 0.1, "q25": 0.25, "median": 0.5, "q75": 0.75, "q90": 0.9, "max": 1}
_MOST_GROUPS = 20  # domains
_FAR = 10.0  # times the median; clients that differ in their features stay below 3


def by_client(
    names: Sequence[str], values: Sequence[float], limit: int, mean: bool = True
) -> dict[str, float | None]:
    """Returns client -> its value (None if it is not finite), or a summary of many clients.

    The summary of more than `limit` clients is {"mean", "min", "q10", ..., "max"} over those with a
    value, and "DOMAIN/*" -> mean for each of at most 20 domains with several clients, whose names
    are "DOMAIN/NUMBER". With `mean`, few clients have an entry "mean" too, their plain mean.
    """
    values = np.asarray(values, float)
    finite = np.isfinite(values)
    if len(names) <= limit:
        named = dict(zip(names, np.where(finite, values, None).tolist(), strict=True))
        return named | ({"mean": float(values.mean())} if mean else {})

    def mean_of(rows: np.ndarray) -> float | None:
        return float(values[rows].mean()) if rows.any() else None

    summary = {"mean": mean_of(finite)} | dict.fromkeys(QUANTILES)
    if finite.any():
        points = np.quantile(values[finite], [*QUANTILES.values()]).tolist()
        summary |= zip(QUANTILES, points, strict=True)
    domains = np.array([name.rpartition("/")[0] for name in names])
    several = dict.fromkeys(filter(None, domains.tolist()))
    if len(several) <= _MOST_GROUPS:
        summary |= {f"{domain}/*": mean_of(finite & (domains == domain)) for domain in several}
    return summary


def some_of(count: int, limit: int) -> np.ndarray:
    """Returns at most `limit` of the numbers 0..count-1, evenly spaced, both ends included."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int))


def round_record(
    names: list[str], metrics: dict[str, np.ndarray], number: int, seconds: float, limit: int = 100
) -> Record:
    """Returns one line of metrics.jsonl; a client that did not take part has the loss None.

    `far_norms` has the norms of updates above ten times their median, as multiples of it. More than
    `limit` clients have a summary (`by_client`) and, if not all took part, `clients`, who did.
    """
    values = {key: by_client(names, metrics[key], limit, mean=False) for key in ("loss", "weights")}
    record = {"round": number, **values, "seconds": seconds}
    if "norm" in metrics:
        norms = np.asarray(metrics["norm"], float)
        record["norm"] = by_client(names, norms, limit, mean=False)
        finite = norms[~np.isnan(norms)]
        middle = float(np.median(finite)) if len(finite) > 2 else 0.0
        if middle and (far := np.flatnonzero(norms > _FAR * middle)).size:
            # None, because JSON has no infinite numbers.
            multiples = [x if np.isfinite(x) else None for x in (norms[far] / middle).tolist()]
            record["far_norms"] = dict(zip([names[k] for k in far], multiples, strict=True))
    # A client with a loss that is not finite took part only if its update is not finite either.
    took_part = np.isfinite(metrics["loss"]) | ~metrics["finite"]
    if len(names) > limit and not took_part.all():
        record["clients"] = np.flatnonzero(took_part).tolist()
    if not metrics["finite"].all():
        record["not_finite"] = [names[k] for k in np.flatnonzero(~metrics["finite"])]
    if not metrics["server_finite"]:
        record["server_finite"] = False
    return record


def warnings_of(record: Record) -> list[str]:
    """Returns warnings: a round without weights, and each norm that is far from the others'."""
    idle = [] if any(record["weights"].values()) else ["no client counts: the shared leaves stay"]
    norms = []
    for name, times in record.get("far_norms", {}).items():
        size = "overflows" if times is None else f"is {times:.3g} times the median norm"
        norms.append(f"the norm of {name}'s update {size}")
    return [f"round {record['round']}: {warning}" for warning in idle + norms]


def have_trained(records: list[Record], names: list[str]) -> np.ndarray:
    """Returns bool[K], which clients have trained in some round so far, with a finite update."""
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


def select_round(records: list[Record]) -> int:
    """Returns the round with the best mean validation accuracy; without any, the last evaluated."""
    # Over Flower, some rounds may be evaluated without validation samples. Of equals, the first.
    if validated := [record for record in records if "validation" in record]:
        return max(validated, key=lambda record: record["validation"]["mean"])["round"]
    return [record["round"] for record in records if "accuracy" in record][-1]


def out_of_patience(records: list[Record], patience: int) -> bool:
    """Returns whether the last round was evaluated `patience` (0: never) rounds after the best."""
    if not patience or not records or "validation" not in records[-1]:
        return False
    return records[-1]["round"] - select_round(records) >= patience


def summarize(
    experiment: Experiment, records: list[Record], compile_seconds: float, **entries: Any
) -> Record:
    """Returns the content of summary.json; accuracies are percentages, or mAPs of a detector."""
    plan, selected = experiment.plan, select_round(records)
    best, seconds = records[selected - 1], median(record["seconds"] for record in records)
    parts = {"internal": experiment.internal.domains, "unseen": experiment.unseen}

    def scores(record: Record, internal: str = "accuracy", unseen: str = "unseen") -> Record:
        return {"internal": record[internal], "unseen": record.get(unseen, {})}

    summary = {
        "method": plan.method,
        "dataset": experiment.internal.name,
        "seed": plan.seed,
        "rounds": len(records),
        "selected_round": selected,
        "tested_on": {whom: scored_part(domains) for whom, domains in parts.items() if domains},
        "accuracy": scores(best),
        "last_round": scores(records[-1]),
    }
    if "measures" in best:
        summary["measures"] = scores(best, "measures", "unseen_measures")
        summary["measures_over"] = best.get("measures_over", {})
    summary |= {
        "seconds_per_round": seconds,
        "compile_seconds": compile_seconds,
        "samples_per_second": samples_a_round(experiment) / seconds,
    }
    if not experiment.task.classifies:
        summary["score"] = experiment.task.score.name
    if plan.patience:
        summary["stopped_early"] = len(records) < plan.rounds
    return summary | entries


def samples_a_round(experiment: Experiment) -> float:
    """Returns the mean number of samples that a round trains on, for clients of mean size."""
    work, who, sizes = experiment.work, experiment.participation, experiment.train_sizes()
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
