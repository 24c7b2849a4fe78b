"""Workdirs of finished runs as a run leaves them, written by hand: nothing is trained."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedjax_bn.run.config import base, flatten


def finished(
    folder: Path,
    method: str,
    seed: int,
    internal: Mapping[str, float],
    unseen: Mapping[str, Mapping[str, float]] | None = None,
    dataset: str = "tiny",
    tested_on: str = "test",
    **changes: object,
) -> Path:
    """FOLDER/METHOD-SEED, or FOLDER/NAME: a run of two rounds, both evaluated, of equal scores.

    Scores are in percent: client -> accuracy, to which their mean is added, and domain ->
    adaptation -> accuracy. `changes` are keys of the configuration, `__` for a dot.
    """
    place = folder / str(changes.pop("name", f"{method}-{seed}"))
    place.mkdir(parents=True)
    config = dict(flatten(base())) | {"method": method, "seed": seed, "rounds": 2}
    config |= {"data.name": dataset, "target": ",".join(unseen or ())}
    config |= {key.replace("__", "."): value for key, value in changes.items()}
    scores = dict(internal) | {"mean": float(np.mean(list(internal.values())))}
    both = {"internal": scores, "unseen": dict(unseen or {})}
    summary = {"method": method, "dataset": dataset, "seed": seed, "rounds": 2}
    summary |= {"tested_on": {"internal": tested_on, "unseen": "test"}}
    summary |= {"selected_round": 2, "accuracy": both, "last_round": both}
    summary |= dict.fromkeys(("seconds_per_round", "compile_seconds", "samples_per_second"), 1.0)
    records = [
        {
            "round": number,
            "loss": dict.fromkeys(internal, 1.0 / number),
            "weights": dict.fromkeys(internal, 1 / len(internal)),
            "seconds": 1.0,
            "accuracy": scores,
            **({"unseen": both["unseen"]} if unseen else {}),
        }
        for number in (1, 2)
    ]
    about = {"config": config, "data": f"data of {seed}", "notes": []}
    (place / "config.json").write_text(json.dumps(about))
    (place / "summary.json").write_text(json.dumps(summary))
    (place / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return place


def counted(
    place: Path, samples: Mapping[str, int], unseen: Mapping[str, int], train: int = 7
) -> None:
    """Writes data.json: how many test samples clients and domains have, all of class 0 of two."""

    def split(count: int) -> dict:
        return {"samples": count, "classes": [count, 0]}

    content = {
        "classes": ["no", "yes"],
        "clients": {name: {"train": split(train), "test": split(n)} for name, n in samples.items()},
        "unseen": {name: {"test": split(n)} for name, n in unseen.items()},
        "boxes": False,
        "number": len(samples),
    }
    (place / "data.json").write_text(json.dumps(content))
