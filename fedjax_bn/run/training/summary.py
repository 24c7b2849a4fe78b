"""From the records of a run to its selected round, its end, and its summary."""

from statistics import median
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.run.errors import WorkdirError
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.experiment.method import local_epochs
from fedjax_bn.run.training.records import Record


def select_round(records: list[Record]) -> int:
    """Returns the evaluated round with the best mean validation accuracy, the first of equals.

    `config.validate_with` chooses whose models are validated. Without a validation split it is the
    last evaluated round.
    """
    evaluated = [record for record in records if "accuracy" in record]
    best = evaluated[-1]
    if "validation" in best:
        best = max(evaluated, key=lambda record: record["validation"]["mean"])
    return best["round"]


def out_of_patience(records: list[Record], patience: int) -> bool:
    """Returns whether the last round was evaluated, `patience` or more rounds after the best one.

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
    """Returns the content of summary.json; accuracies are percentages, of a detector mAPs.

    `rounds` are those that were made, fewer than `config.rounds` if the run ran out of patience,
    which `stopped_early` says. `seconds_per_round` is the median over all rounds,
    `samples_per_second` the training samples of a round divided by it, and `compile_seconds` those
    of the last start, 0 if no round was left.

    Args:
      config: the run's.
      experiment: what it names.
      records: of all rounds, in order.
      compile_seconds: of the program of a round.
      **more: further entries that are known at the start, such as `traffic={...}`.
    """
    selected = select_round(records)
    best, seconds = records[selected - 1], median(record["seconds"] for record in records)
    measures = {}
    if "measures" in best:
        outside = best.get("unseen_measures", {})
        measures = {"measures": {"internal": best["measures"], "unseen": outside}}
    return {
        "method": config.method,
        "dataset": experiment.internal.name,
        "seed": config.seed,
        "rounds": len(records),
        "selected_round": selected,
        "accuracy": _accuracies(best),
        "last_round": _accuracies(records[-1]),
        **measures,
        "seconds_per_round": seconds,
        "compile_seconds": compile_seconds,
        "samples_per_second": samples_a_round(config, experiment) / seconds,
        **({} if experiment.task.classifies else {"score": experiment.task.score.name}),
        **({"stopped_early": len(records) < config.rounds} if config.patience else {}),
        **more,
    }


def _accuracies(record: Record) -> Record:
    """Returns the accuracies of one evaluated round: {"internal": ..., "unseen": ...}.

    Raises:
      WorkdirError: its line was changed.
    """
    if "accuracy" not in record:
        raise WorkdirError(
            f"metrics.jsonl has no accuracies of round {record['round']}, which was evaluated: "
            "move the workdir away and start again, or give another --workdir"
        )
    return {"internal": record["accuracy"], "unseen": record.get("unseen", {})}


def samples_a_round(config: ConfigDict, experiment: Experiment) -> float:
    """Returns how many samples a round trains on, on average, with clients of mean size.

    Args:
      config: steps or epochs, `clients_per_round`, and who drops out.
      experiment: with its clients, and the trace of who is available.
    """
    domains = experiment.internal.domains
    total = len(domains)
    if config.local_steps:
        samples = total * config.local_steps * config.batch_size
    else:
        sizes = [len(domain.train.images) for domain in domains]
        samples = int(np.dot(np.broadcast_to(local_epochs(config), total), sizes))
    present = config.clients_per_round or total
    trace = experiment.participation.trace
    if trace is not None:
        available = np.unpackbits(trace, axis=1, count=total).sum(1)
        present = np.minimum(available, present).mean()
    return samples * float(present * (1 - config.participation.dropout)) / total
