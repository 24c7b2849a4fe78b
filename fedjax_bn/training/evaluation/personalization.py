"""Sets aside labelled samples, to which a client adapts its model before it is tested.

Per-FedAvg (Fallah et al. 2020) trains a start for this, and UniFed tests that method this way, on
internal and external clients (sections 4.1.2 and 4.1.3). The labelled samples are drawn at random
from the split that is evaluated, and never count in the accuracy.
"""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.division.by_class import number_groups
from fedjax_bn.data.domain import Dataset, Domain, Split, select, splits, whole
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods.perfedavg import personalize


class Personalization(NamedTuple):
    """How a client adapts before its test; at least one step, on at least one sample of `seed`."""

    samples: int
    steps: int
    rate: float
    seed: int


def personalization_of(
    method: FederatedMethod,
    seed: int,
    samples: int | None = None,
    steps: int = 1,
    rate: float | None = None,
) -> Personalization | None:
    """Returns how clients adapt before they are tested; None values are the method's own."""
    usual_rate = inspect.signature(personalize).parameters["inner_rate"].default
    method_samples, method_rate = method.personalize or (0, usual_rate)
    samples = method_samples if samples is None else samples
    rate = method_rate if rate is None else rate
    return Personalization(samples, steps, rate, seed) if samples else None


def check_labelled(
    choice: Personalization | None, internal: Dataset, unseen: Sequence[Domain]
) -> None:
    """Raises ConfigError if a client has too few samples to label some and test the others."""
    if not choice:
        return
    key = f"config.personalize_samples={choice.samples}"
    if any(isinstance(domain.test.labels, dict) for domain in (*internal.domains, *unseen)):
        raise ConfigError(
            f"{key} adapts classifiers, but images of {internal.name} have boxes or masks: set it "
            "to 0"
        )
    tested = [(domain.name, *part) for domain in internal.domains for part in splits(domain)]
    tested += [(domain.name, "whole", whole(domain)) for domain in unseen]
    for client, name, split in tested:
        labelled, unlabelled = _draw_labelled(split, choice)
        if name != "train" and (len(labelled) < choice.samples or not len(unlabelled)):
            raise ConfigError(
                f"{key} leaves none to test of the {len(split.images)} samples in the {name} split "
                f"of {client!r}: lower it, or set it to 0 to test without personalization"
            )


def _draw_labelled(split: Split, choice: Personalization) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the labelled samples and of those that are tested, i64[n] and i64[m].

    Samples with one name, such as windows of a recording, are never on both sides: if some are
    labelled, the others of that name are not tested.
    """
    # The same samples in every round and every command, whatever else the run draws.
    group = number_groups(split.names, len(split.images))
    labelled = np.random.default_rng(choice.seed).permutation(len(group))[: choice.samples]
    return labelled, np.flatnonzero(~np.isin(group, group[labelled]))


def set_aside(
    parts: Sequence[Split], choice: Personalization
) -> tuple[tuple[Split, ...], tuple[Split, ...]]:
    """Returns the labelled samples of each split, and the tested ones in the split's order.

    A split that several clients have (the same object) stays one object, which is stored once.
    """
    divided = {
        id(split): tuple(select(split, index) for index in _draw_labelled(split, choice))
        for split in {id(split): split for split in parts}.values()
    }
    return tuple(zip(*(divided[id(split)] for split in parts), strict=True))
