"""From the records of a run to its summary, and which round is selected."""

from statistics import median
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.run.errors import WorkdirError
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.experiment.method import local_epochs
from fedjax_bn.run.training.records import Record


def select_round(records: list[Record]) -> int:
    """The evaluated round with the best mean validation accuracy, the first of equals.

    Whose models it is of says `config.validate_with`. Without a validation split it is the last
    evaluated round.
    """
    evaluated = [record for record in records if "accuracy" in record]
    best = evaluated[-1]
    if "validation" in best:
        best = max(evaluated, key=lambda record: record["validation"]["mean"])
    return best["round"]


def out_of_patience(records: list[Record], patience: int) -> bool:
    """Whether the last round was evaluated and the best one lies `patience` rounds back or more.

    Args:
      records: of all rounds so far.
      patience: `config.patience`; with 0 it never is.
    """
    if not patience or not records or "validation" not in records[-1]:
        return False
    return records[-1]["round"] - select_round(records) >= patience


def summarize(
    config: ConfigDict,
    experiment: Experiment,
    records: list[Record],
    compile_seconds: float,
    **more: Any,
) -> Record:
    """The content of summary.json; accuracies are percentages, of a detector mAPs (`score`).

    `rounds` are those that were made, fewer than `config.rounds` where the run ran out of patience.
    `seconds_per_round` is the median over all rounds, `samples_per_second` the training samples of
    a round divided by it (`samples_a_round`), `compile_seconds` those of the last start, 0 where
    no round was left. Where there is a patience, `stopped_early` says whether it ended before
    `config.rounds`.

    Args:
      config: the run's.
      experiment: what it names.
      records: of all rounds, in order.
      compile_seconds: of the program of a round.
      **more: further entries that are known at the start, such as `traffic={...}`.
    """
    selected = select_round(records)
    seconds = median(record["seconds"] for record in records)
    return {
        "method": config.method,
        "dataset": experiment.internal.name,
        "seed": config.seed,
        "rounds": len(records),
        "selected_round": selected,
        "accuracy": _accuracies(records[selected - 1]),
        "last_round": _accuracies(records[-1]),
        **_measures(records[selected - 1]),
        "seconds_per_round": seconds,
        "compile_seconds": compile_seconds,
        "samples_per_second": samples_a_round(config, experiment) / seconds,
        **({} if experiment.task.classifies else {"score": experiment.task.score.name}),
        **({"stopped_early": len(records) < config.rounds} if config.patience else {}),
        **more,
    }


def samples_a_round(config: ConfigDict, experiment: Experiment) -> float:
    """How many samples a round trains on: those of as many clients of mean size as take part.

    Args:
      config: steps or epochs, `clients_per_round`, and who drops out.
      experiment: with its clients, and the trace of who is available.
    """
    domains = experiment.internal.domains
    if config.local_steps:
        samples = len(domains) * config.local_steps * config.batch_size
    else:
        sizes = [len(domain.train.images) for domain in domains]
        samples = int(np.dot(np.broadcast_to(local_epochs(config), len(sizes)), sizes))
    return samples * _taking_part(config, experiment) / len(domains)


def _taking_part(config: ConfigDict, experiment: Experiment) -> float:
    """How many clients take part in a round, on average."""
    total = len(experiment.internal.domains)
    present = config.clients_per_round or total
    if experiment.trace is not None:
        available = np.unpackbits(experiment.trace, axis=1, count=total).sum(1)
        present = np.minimum(available, present).mean()
    return float(present * (1 - config.participation.dropout))


def _accuracies(record: Record) -> Record:
    """The accuracies of one evaluated round: {"internal": ..., "unseen": ...}.

    Raises:
      WorkdirError: its line was changed.
    """
    if "accuracy" not in record:
        raise WorkdirError(
            f"metrics.jsonl has no accuracies of round {record['round']}, which was evaluated: "
            "move the workdir away and start again, or give another --workdir"
        )
    return {"internal": record["accuracy"], "unseen": record.get("unseen", {})}


def add_unseen(summary: Record, record: Record) -> None:
    """Adds what `evaluate_unseen.unseen_evaluator` found once, at the end, to a summary."""
    if "unseen" in record:
        summary["accuracy"]["unseen"] = record["unseen"]
    if "unseen_measures" in record:
        summary["measures"]["unseen"] = record["unseen_measures"]


def _measures(record: Record) -> Record:
    """{"measures": {"internal", "unseen"}} of an evaluated round, see `run.answers`; or {}."""
    if "measures" not in record:
        return {}
    inside, outside = record["measures"], record.get("unseen_measures", {})
    return {"measures": {"internal": inside, "unseen": outside}}
