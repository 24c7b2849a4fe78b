"""Samples that belong together: windows of one recording, corruptions of one photograph.

A group is all samples with one name. Whoever divides samples divides groups, so that a model is
never tested on a recording that it was trained on. Where all names differ, groups are samples.
"""

import numpy as np


def number_groups(names: np.ndarray | None, count: int) -> np.ndarray:
    """The number of each sample's group, i64[count], counted by first appearance from 0.

    Args:
      names: str[count]; None where each sample is a group of its own.
      count: number of samples.
    """
    if names is None:
        return np.arange(count)
    _, first, inverse = np.unique(
        np.asarray(names, np.str_), return_index=True, return_inverse=True
    )
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def first_samples(group: np.ndarray) -> np.ndarray:
    """The first sample of each group, i64[G]; its label counts as the group's."""
    return np.unique(group, return_index=True)[1]


def samples_of(chosen: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The samples of the chosen groups, one group after the other.

    Args:
      chosen: i64[g], numbers of groups.
      group: i64[N], the group of each sample, see `number_groups`.

    Returns:
      i64[n]; `chosen` itself where each sample is a group of its own.
    """
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(group))
    sizes = np.bincount(group)[chosen]
    steps = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[np.repeat(ends[chosen] - sizes, sizes) + steps]
