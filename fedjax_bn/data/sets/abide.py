"""ABIDE I: patients with autism and controls told apart by their connectomes, one domain a site.

The folder holds the phenotypic table and, in it or in any folder below, the regions' time series
that the Preprocessed Connectomes Project publishes for one atlas (its pipelines' `rois_ATLAS`):

    phenotypic.csv                    any name; columns FILE_ID, SITE_ID, DX_GROUP among others
    rois_ho/NYU_0050952_rois_ho.1D    FILE_ID_rois_ATLAS.1D: a header line, T rows of R numbers

A sample is the connectome of a window of 32 frames, the correlations of all pairs of R regions as
a vector f32[R (R - 1) / 2]: 6105 features for the Harvard-Oxford atlas (111 regions), 19900 for
CC200. FedBN D.4 slides the window frame by frame, since subjects are few: 145 windows of each
subject at NYU. All windows of a subject have its name, so that no split separates them.

Memory: 4 R (R - 1) / 2 bytes a window. FedBN's four sites (370 subjects, 63,550 windows) take
1.6 GB with the Harvard-Oxford atlas; neighbouring windows share 31 of 32 frames, so `stride` or
`windows_per_subject` saves memory at little loss. With a cache they lie on disk, memory-mapped.

References: Di Martino et al., "The autism brain imaging data exchange", Molecular Psychiatry 2014;
Craddock et al., "The Neuro Bureau Preprocessing Initiative", 2013; Li et al., "FedBN", ICLR 2021,
section 5.2 and appendix D.4.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.messages import first_few, progress_bar
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.sets.abide_files import (
    Subject,
    find_series,
    read_subjects,
    read_table,
    series_of_sites,
)
from fedjax_bn.data.sets.connectome import connectomes, num_pairs, window_starts
from fedjax_bn.data.source import Pool, Source

_CLASSES = ("control", "patient")


def load(
    path: str | Path,
    *,
    sites: Sequence[str] = (),
    atlas: str = "",
    cache: str | Path | None = None,
    progress: bool = True,
    **windows: Any,
) -> Source:
    """ABIDE I as f32[N, R (R - 1) / 2], two classes, one pool a site.

    Args:
      path: the folder, laid out as above.
      sites: the SITE_ID to take, in this order; empty for all that have series, by name. FedBN's
        four are NYU, USM, UM_1 and UCLA_1.
      atlas: such as "ho" or "cc200", where the folder has several.
      cache: folder for the samples; without one they are held in memory.
      progress: show how far their computation is.
      **windows: how a series is cut and described, fields of `Windows`.

    Returns:
      Source "abide"; label 1 is a patient (DX_GROUP 1), 0 a control (DX_GROUP 2). A region that
      does not vary within a window correlates 0 with all others; the notes count them.

    Raises:
      FileNotFoundError: the folder, the table or all series are missing.
      ValueError: an argument is out of range, or a file does not suit; up to ten are named.

    Differs from the paper: its vectors have 5995 = 110 * 109 / 2 features, those of 110 regions,
    and it does not say which of the Harvard-Oxford atlas it leaves out. The published series have
    111, which are all kept here: 111 * 110 / 2 = 6105.
    """
    how = Windows(**windows)
    _check_windows(how)
    files = find_series(Path(path), atlas)
    table = read_table(Path(path))
    chosen = series_of_sites(files, table, sites)
    subjects = read_subjects(chosen, table, how.window)
    pools, flat = [], []
    for site in list(sites) or sorted({subject.site for subject in subjects}):
        members = [subject for subject in subjects if subject.site == site]
        pool, found = _pool(site, members, how, Path(cache) if cache else None, progress)
        pools.append(pool)
        flat += found
    return Source(
        "abide",
        _CLASSES,
        tuple(pools),
        mean=(0.0,),
        std=(1.0,),
        notes=_notes(flat, len(table.keys() - files.keys())),
        key=_hash_of_subjects(subjects, how),
    )


class Windows(NamedTuple):
    """How a series is cut and described.

    Attributes:
      window: frames of a sliding window, at least 2; 0 for the whole series, one sample a subject.
      stride: frames from one window to the next.
      windows_per_subject: if above 0, at most so many of a subject's windows, evenly spaced.
      fisher_z: z = arctanh(r) in place of correlations r.
    """

    window: int = 32
    stride: int = 1
    windows_per_subject: int = 0
    fisher_z: bool = False


def _check_windows(how: Windows) -> None:
    if how.window < 0 or how.window == 1:
        raise ValueError(
            f"window is {how.window}; it must be 0 (whole series) or at least 2 frames"
        )
    if how.stride < 1:
        raise ValueError(f"stride is {how.stride}; it must be at least 1 frame")
    if how.windows_per_subject < 0:
        raise ValueError(
            f"windows_per_subject is {how.windows_per_subject}; it must be at least 1, or 0 for all"
        )


def _pool(
    site: str, subjects: list[Subject], how: Windows, cache: Path | None, progress: bool
) -> tuple[Pool, tuple[str, ...]]:
    """The windows of a site's subjects, and "NAME (COUNT)" of those with flat regions."""
    starts = [window_starts(len(s.series), *how[:3]) for s in subjects]
    counts = [len(part) for part in starts]
    features = num_pairs(subjects[0].series.shape[1])

    def make(write: Write) -> tuple[str, ...]:
        flat = []
        with progress_bar(sum(counts), f"connectomes of {site}", progress) as shown:
            for subject, part in zip(subjects, starts, strict=True):
                rows, found = connectomes(subject.series, part, how.window, how.fisher_z)
                write(rows.view(np.uint8))
                flat += [f"{subject.name} ({found.any(0).sum()})"] * bool(found.any())
                shown.update(len(part))
        return tuple(flat)

    name, shape = f"abide-{_hash_of_subjects(subjects, how)[:20]}", (sum(counts), 4 * features)
    rows, flat = cached_array(cache, name, shape, make)
    images = rows.view(np.float32)
    labels = np.repeat(np.array([s.label for s in subjects], np.int32), counts)
    return Pool(site, images, labels, np.repeat([s.name for s in subjects], counts)), flat


def _hash_of_subjects(subjects: list[Subject], how: Windows) -> str:
    """SHA-256 of what the samples are computed from."""
    state = hashlib.sha256(repr(tuple(how)).encode())
    for subject in subjects:
        state.update(repr((*subject[:3], subject.series.shape)).encode())
        state.update(subject.series.astype("<f8").tobytes())
    return state.hexdigest()


def _notes(flat: list[str], absent: int) -> tuple[str, ...]:
    notes = []
    if flat:
        notes.append(
            f"abide: {len(flat)} subjects have regions that do not vary within a window, which "
            f"correlate 0 with all others there: {first_few(flat)}"
        )
    if absent:
        notes.append(f"abide: {absent} subjects of the phenotypic table have no series here")
    return tuple(notes)
