"""What a federation leaves for unseen clients: a folder that `fedjax-bn serve` and `evaluate` read.

WORKDIR/served has the form of a finished run of one client, whose personal leaves are the mean of
all clients' (`global_variables` of the simulation), where they have sent them.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.federation import FederatedState
from fedjax_bn.flower.host import Host, Kept
from fedjax_bn.flower.site import deployed
from fedjax_bn.run.config.keys import flatten
from fedjax_bn.run.experiment.privacy import describe_privacy
from fedjax_bn.run.files import checkpoint
from fedjax_bn.run.files.workdir import write_json
from fedjax_bn.run.training.records import Record
from fedjax_bn.run.training.summary import select_round


def write_served(
    host: Host, place: Path, app: str | Path, kept: Kept, records: Sequence[Record]
) -> str:
    """Writes WORKDIR/served from the selected round, or the last one; returns a sentence on it.

    Args:
      host: the server's side.
      place: the workdir.
      app: the app's folder, where a user's own modules lie.
      kept: behind the last round.
      records: of all rounds.

    Raises:
      CheckpointError, WorkdirError: a checkpoint is damaged, or cannot be written.
    """
    like = jax.eval_shape(host.one)
    if jax.tree.leaves(like.personal) and not jax.tree.leaves(kept.served):
        return (
            "an unseen client cannot be served, because personal leaves stayed with the clients: "
            "serve-unseen=true in the run config and in each node config would send them"
        )
    evaluated = any("accuracy" in record for record in records)
    number = select_round(list(records)) if evaluated else len(records)
    with checkpoint.open_folder(place / "checkpoints" / "selected", keep=1) as manager:
        if number in checkpoint.steps(manager):
            kept = checkpoint.restore(manager, jax.eval_shape(host.start), number)
    folder = place / "served"
    write_json(folder / "config.json", _about(host, app))
    with checkpoint.open_folder(folder / "checkpoints" / "latest", keep=1) as manager:
        checkpoint.save(manager, number, _of_one(host, kept))
        checkpoint.settle(manager)
    write_json(folder / "summary.json", _summary(host, records, number))
    command = shlex.join(("fedjax-bn", "serve", "--workdir", str(folder), "--export", "FOLDER"))
    return f"round {number} can be served: {command}"


def _of_one(host: Host, kept: Kept) -> FederatedState:
    """The state of a federation of one client, who has what an unseen one receives."""
    state = host.one()
    personal = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], kept.served)
    personal = personal if jax.tree.leaves(personal) else state.personal
    given = kept.state
    return state._replace(
        round=given.round, shared=given.shared, server=given.server, personal=personal
    )


def _about(host: Host, app: str | Path) -> dict[str, Any]:
    """config.json, as `finished.read_about` wants it."""
    config = deployed(host.config)
    config.target = ""
    form = {"dataset": host.order.federation, "clients": ["federation"]} | json.loads(host.form)
    return {
        "config": dict(flatten(config)),
        "data": host.order.federation,
        "form": form,
        "started_in": str(Path(app).resolve()),
    }


def _summary(host: Host, records: Sequence[Record], number: int) -> dict[str, Any]:
    """summary.json, as `forms.SUMMARY` wants it; accuracies where clients told them."""
    scores = [
        {"internal": records[n - 1].get("accuracy", {"mean": float("nan")}), "unseen": {}}
        for n in (number, len(records))
    ]
    return {
        "method": host.config.method,
        "dataset": host.order.federation,
        "seed": host.config.seed,
        "rounds": len(records),
        "selected_round": number,
        "accuracy": scores[0],
        "last_round": scores[1],
        "seconds_per_round": median(record["seconds"] for record in records),
        # Clients alone know how long they compile, and how many samples they train on.
        "compile_seconds": float("nan"),
        "samples_per_second": float("nan"),
        **describe_privacy(deployed(host.config), host.run.clients, len(records)),
    }
