"""The record of a round, a line of metrics.jsonl, and the faults that end a run."""

from typing import Any

import numpy as np

from fedjax_bn.engine.extrapolation import check_risks
from fedjax_bn.run.errors import NotFiniteError, RiskError
from fedjax_bn.run.evaluation.groups import by_client

Record = dict[str, Any]  # as JSON has it: of a round, a run, an evaluation


def round_record(
    names: list[str],
    metrics: dict[str, np.ndarray],
    number: int,
    seconds: float,
    limit: int = 100,
) -> Record:
    """Returns one line of metrics.jsonl; a client that took no part has the loss None.

    With more than `limit` clients it has a summary (`run.evaluation.groups`), and `clients`, the
    numbers of those that took part, if not all did.

    Args:
      names: of the K clients.
      metrics: of the round, as a method's `round` returns them.
      number: of the round, from 1.
      seconds: that it took.
      limit: the configuration's `clients_named`.
    """
    record = {
        "round": number,
        "loss": by_client(names, metrics["loss"], limit, mean=False),
        "weights": by_client(names, metrics["weights"], limit, mean=False),
        "seconds": seconds,
    }
    # The loss of a client whose update is not finite may not be either.
    took_part = np.isfinite(metrics["loss"]) | ~metrics["finite"]
    if len(names) > limit and not took_part.all():
        record["clients"] = np.flatnonzero(took_part).tolist()
    if not metrics["finite"].all():
        record["not_finite"] = [n for n, ok in zip(names, metrics["finite"], strict=True) if not ok]
    if not metrics["server_finite"]:
        record["server_finite"] = False
    return record


def have_trained(records: list[Record], names: list[str] | None = None) -> np.ndarray:
    """Returns who has trained in at least one round, and kept it: bool[K].

    Args:
      records: of all rounds so far, at least one.
      names: of the K clients; by default those of the first record, which then has them.
    """
    names = names or list(records[0]["loss"])
    number = {name: k for k, name in enumerate(names)}
    trained = np.zeros(len(names), bool)
    for record in records:
        mine = np.ones(len(names), bool)
        if "clients" in record:
            mine = np.isin(np.arange(len(names)), record["clients"])
        elif names[0] in record["loss"]:
            mine = np.array([record["loss"].get(name) is not None for name in names])
        mine[[number[name] for name in record.get("not_finite", ())]] = False
        trained |= mine
    return trained


def require_usable(
    record: Record, metrics: dict[str, np.ndarray], names: list[str], on_nonfinite: str
) -> None:
    """Raises an error if the run cannot continue after a round.

    Args:
      record: of the round.
      metrics: of the round, as a method's `round` returns them.
      names: of the K clients.
      on_nonfinite: the configuration's. With "drop" a client whose update is not finite is left
        out, if there are others, and so is a server's step that is not finite. With "stop" none is.

    Raises:
      NotFiniteError: an update of a client or the server's step is not finite.
      RiskError: the weighing rule gave no weights, because it cannot use a risk.
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
