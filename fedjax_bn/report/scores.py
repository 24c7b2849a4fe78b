"""The scores of runs by column and seed, with the samples that they are shares of."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_bn.report.finished_runs import Run
from fedjax_bn.report.intervals import Part

MEAN = "mean"
RUNNING = "running"


class Score(NamedTuple):
    """A score of one seed.

    Attributes:
      value: percent.
      parts: the shares that it is the plain mean of, with their test samples.
      right: of each part who was right, bool[n], where it is known of all.
      data: the hash of the data, so that only answers to the same samples are paired.
    """

    value: float
    parts: tuple[Part, ...]
    right: tuple[np.ndarray, ...] = ()
    data: str = ""


Seeds = dict[int, Score]
Scores = dict[str, Seeds]  # column -> seed -> score


def internal_scores(runs: Sequence[Run]) -> Scores:
    """Scores of the internal clients by column: their mean, and each client.

    Of runs that leave out different domains, whose clients differ: the mean over the domains left
    out, and the mean of the clients without each.
    """
    targets = list(dict.fromkeys(run.target for run in runs))
    if len(targets) > 1:
        return _with_mean(
            {
                f"mean without {target or 'none'}": {
                    run.summary["seed"]: _mean_inside(run) for run in runs if run.target == target
                }
                for target in targets
            }
        )
    found: Scores = {}
    for run in runs:
        inside = run.summary["accuracy"]["internal"]
        found.setdefault(MEAN, {})[run.summary["seed"]] = _mean_inside(run)
        for client in inside.keys() - {MEAN}:
            found.setdefault(client, {})
        for client, value in inside.items():
            if client != MEAN:
                found[client][run.summary["seed"]] = _score(run, value, {client: value})
    order = [MEAN, *runs[0].summary["accuracy"]["internal"]]
    return {column: found[column] for column in dict.fromkeys((*order, *found))}


def unseen_scores(runs: Sequence[Run]) -> dict[str, Scores]:
    """Adaptation -> scores by unseen domain, the mean over all in front where there are several."""
    found: dict[str, Scores] = {}
    for run in runs:
        for domain, row in run.summary["accuracy"]["unseen"].items():
            for adaptation, value in row.items():
                seeds = found.setdefault(adaptation, {}).setdefault(domain, {})
                seeds[run.summary["seed"]] = _score(run, value, {domain: value}, adaptation)
    return {
        name: _with_mean(scores) if len(scores) > 1 else scores for name, scores in found.items()
    }


def _with_mean(scores: Scores) -> Scores:
    """Scores with their mean in front, over the seeds that have them all."""
    complete = set.intersection(*(set(seeds) for seeds in scores.values()))
    mean = {}
    for seed in sorted(complete):
        every = [seeds[seed] for seeds in scores.values()]
        value = float(np.mean([score.value for score in every]))
        mean[seed] = Score(
            value,
            _together(score.parts for score in every),
            _together(score.right for score in every),
            " ".join(score.data for score in every),
        )
    return ({MEAN: mean} if mean else {}) | scores


def _together(parts: Iterable[tuple]) -> tuple:
    """All of them, or none where some are not known."""
    every = list(parts)
    return tuple(part for known in every for part in known) if all(every) else ()


def _mean_inside(run: Run) -> Score:
    inside = dict(run.summary["accuracy"]["internal"])
    return _score(run, inside.pop(MEAN), inside)


def _score(run: Run, value: float, parts: Mapping[str, float], adaptation: str = "") -> Score:
    """A score that is the mean of those of some clients or domains."""
    counts = {name: run.tested(name, adaptation) for name in parts}
    if not all(counts.values()):
        return Score(value, ())
    known = [run.answers.get((name, adaptation)) for name in parts]
    right = tuple(one.right for one in known) if all(known) else ()
    shares = tuple((share, counts[name]) for name, share in parts.items())
    return Score(value, shares, right, run.about["data"])
