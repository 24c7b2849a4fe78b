"""What a reader of a dataset gives: pools of named samples, before anybody owns or trains on any.

`partition` turns a source into the clients of a federation: it leaves the unseen domain out whole,
splits what is left into training, validation and test samples, and shares them out.
"""

from typing import NamedTuple

import numpy as np

TRAIN, VALIDATION, TEST = 0, 1, 2


class Pool(NamedTuple):
    """All samples of one domain.

    Attributes:
      name: of the domain.
      images: u8[N, H, W, C], or f32[N, F] for features that are no images; may be memory-mapped,
        so take rows, not the whole, where few are needed.
      labels: i32[N], indices into the source's classes.
      names: str[N], where each sample comes from, such as its path in the dataset's folder.
        Samples with the same name (windows of one recording, corruptions of one photograph) belong
        together: no split separates them.
      parts: i8[N], the authors' own split (TRAIN, VALIDATION or TEST); None where there is none.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    names: np.ndarray
    parts: np.ndarray | None = None


class Source(NamedTuple):
    """A dataset as its authors publish it: domains that share their classes.

    Attributes:
      name: of the dataset.
      classes: their names, in the order of the labels.
      pools: one a domain.
      mean, std: per channel (or one for all); images reach a model as (u8/255 - mean)/std.
      notes: sentences for the user on what was converted, skipped or differs from the publication.
    """

    name: str
    classes: tuple[str, ...]
    pools: tuple[Pool, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()
