"""ABIDE I: patients with autism and controls, classified by connectomes, one domain a site.

The folder holds the phenotypic table and, in it or in any folder below, the regions' time series
that the Preprocessed Connectomes Project publishes for one atlas (its pipelines' `rois_ATLAS`):

    phenotypic.csv                    any name; columns FILE_ID, SITE_ID, DX_GROUP among others
    rois_ho/NYU_0050952_rois_ho.1D    FILE_ID_rois_ATLAS.1D: a header line, T rows of R numbers

A sample is the connectome of a window of 32 frames, the correlations of all pairs of R regions as
a vector f32[R (R - 1) / 2]: 6105 features for the Harvard-Oxford atlas (111 regions), 19900 for
CC200. FedBN D.4 slides the window frame by frame: 145 windows of each subject at NYU, 1.6 GB for
four sites. All windows of a subject have its name, so that no split separates them.

References: Di Martino et al., Molecular Psychiatry 2014; Craddock et al., "The Neuro Bureau
Preprocessing Initiative", 2013; Li et al., "FedBN", ICLR 2021, section 5.2 and appendix D.4.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_bn.arguments.text import first_few
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.seeds import hash_of
from fedjax_bn.data.sets.files import corruption_named, open_table
from fedjax_bn.data.source import Pool, Source

_LABELS = {"1": 1, "2": 0}  # DX_GROUP: 1 autism, 2 control
_BLOCK = 32  # windows at a time, whose matrices stay in the processor's cache
_REMEDY = "fetch the table and one atlas' series from preprocessed-connectomes-project.org/abide"


class _Subject(NamedTuple):
    name: str  # FILE_ID
    site: str
    label: int  # 1 patient, 0 control
    series: np.ndarray  # f64[T, R]


def load_abide(
    path: str | Path,
    *,
    sites: Sequence[str] = (),
    atlas: str = "",
    window: int = 32,
    stride: int = 1,
    cache: str | Path | None = None,
) -> Source:
    """Returns ABIDE I as f32[N, R (R - 1) / 2], one pool a site; label 1 is a patient.

    A region that does not vary within a window correlates 0 with all others. The paper's vectors
    have 5995 features, for 110 regions; here all 111 of the Harvard-Oxford atlas are kept.

    Args:
      sites: the SITE_ID to take; empty for all. FedBN's four are NYU, USM, UM_1 and UCLA_1.
      atlas: such as "ho" or "cc200"; needed if the folder has several.
      window: frames of a sliding window, at least 2; 0 for the whole series, one sample a subject.
      stride: frames from one window to the next, at least 1.
    """
    subjects = _read_subjects(Path(path), atlas, window, sites)

    def key_of(chosen: Sequence[_Subject]) -> str:
        return hash_of((window, stride), *(value for subject in chosen for value in subject))

    def make(write: Write) -> tuple[str, ...]:
        for subject, windows in zip(members, starts, strict=True):
            rows = _connectomes(subject.series, windows, window)
            write(rows.view(np.uint8))  # the cache keeps bytes
        return ()  # no notes

    pools = []
    for site in list(sites) or sorted({subject.site for subject in subjects}):
        members = [subject for subject in subjects if subject.site == site]
        # The first frame of each window that fits; of a whole series, 0.
        ends = [len(subject.series) - window + 1 if window else 1 for subject in members]
        starts = [np.arange(0, end, stride, dtype=np.int64) for end in ends]
        counts, regions = list(map(len, starts)), members[0].series.shape[1]
        shape = (sum(counts), 4 * regions * (regions - 1) // 2)
        folder = Path(cache) if cache else None
        rows, _ = cached_array(folder, f"abide-{key_of(members)}", shape, make)
        labels = np.repeat(np.array([subject.label for subject in members], np.int32), counts)
        names = np.repeat([subject.name for subject in members], counts)
        pools.append(Pool(site, rows.view(np.float32), labels, names))
    classes, key = ("control", "patient"), key_of(subjects)
    return Source("abide", classes, tuple(pools), (0.0,), (1.0,), key=key)


def _read_subjects(path: Path, atlas: str, window: int, sites: Sequence[str]) -> list[_Subject]:
    """Reads the series of the sites, by default all; a ValueError names all that do not suit."""
    files, table = _find_series(path, atlas), _read_table(path)
    present = sorted({table[name][0] for name in files if name in table})
    faults = [f"no series of the site {site}" for site in sites if site not in present]
    subjects = []
    for name, file in files.items():
        site, group = table.get(name, ("", "missing"))
        if sites and name in table and site not in sites:
            continue
        series = _read_series(file)
        subjects.append(_Subject(name, site, _LABELS.get(group, -1), series))
        (frames, count), regions = series.shape, subjects[0].series.shape[1]
        faults += [f"{name} has the DX_GROUP {group!r}, not 1 or 2"] * (group not in _LABELS)
        faults += [f"{name} has {frames} frames, fewer than window={window}"] * (frames < window)
        faults += [f"{name} has {count} regions, another {regions}"] * (count != regions)
    if faults:
        names = ", ".join(present)
        raise ValueError(f"{path}: {first_few(faults)}; there are series of the sites {names}")
    return subjects


def _find_series(path: Path, atlas: str) -> dict[str, Path]:
    """Returns FILE_ID -> its series' file, for the named atlas or the only one."""
    pattern = f"*_rois_{atlas or '*'}.1D"
    # macOS' companions ._NAME have the names of series, and none of their content.
    series = sorted(path.rglob(f"[!.]{pattern}"), key=lambda file: file.name)
    if not series:
        raise FileNotFoundError(f"data.path {path} has no series {pattern}; {_REMEDY}")
    files = {file.stem.rpartition("_rois_")[0]: file for file in series}
    if len(files) < len(series):
        twice = first_few([str(file) for file in series if file not in files.values()], 3)
        raise ValueError(
            f"{twice}: several series of a subject; keep or choose (atlas) one of each"
        )
    return files


def _read_table(path: Path) -> dict[str, tuple[str, str]]:
    """Returns FILE_ID -> (SITE_ID, DX_GROUP) of the one table that has these columns."""
    tables, columns = {}, ("FILE_ID", "SITE_ID", "DX_GROUP")
    for file in sorted(path.glob("[!.]*.csv")):
        with open_table(file) as table:
            if {*columns} <= {*(table.fieldnames or ())}:
                tables[file.name] = [[(row[c] or "").strip() for c in columns] for row in table]
    if len(tables) != 1:
        wrong = f"{path} has the tables {', '.join(tables) or 'none'}"
        raise FileNotFoundError(f"{wrong}; it needs one with {', '.join(columns)}: {_REMEDY}")
    (rows,) = tables.values()
    # pandas may write 1.0 for 1
    return {name: (site, group.removesuffix(".0")) for name, site, group in rows}


def _read_series(path: Path) -> np.ndarray:
    """Reads a `.1D` file as f64[T, R]."""
    with corruption_named(path):
        header, *lines = path.read_text("utf-8", "replace").splitlines()
        series = np.loadtxt(lines, np.float64, comments=None, ndmin=2)
        # Without a header, the first line's numbers would be lost.
        sound = header.lstrip().startswith("#") and min(series.shape) > 1
        if not sound or not np.isfinite(series).all():
            raise ValueError(f"{series.shape} is not a header and finite numbers of [T, R]")
    return series


def _connectomes(series: np.ndarray, starts: np.ndarray, window: int) -> np.ndarray:
    """Returns f32[W, R (R - 1) / 2], the correlations of regions in windows of a series f64[T, R].

    corr(a, b) = sum_t (a_t - mean a) (b_t - mean b) / (|a - mean a| |b - mean b|), and 0 where a or
    b does not vary within the window. Pairs are those above the diagonal, row by row: (0, 1),
    (0, 2), ..., (R - 2, R - 1).
    """
    regions = series.shape[1]
    upper = np.flatnonzero(np.triu(np.ones((regions, regions), bool), 1))
    pairs = np.empty((len(starts), len(upper)), np.float32)
    for block in range(0, len(starts), _BLOCK):
        part = slice(block, block + _BLOCK)
        windows = series[starts[part, None] + np.arange(window or len(series))]
        still = windows.max(1) == windows.min(1)
        centred = windows - windows.mean(1, keepdims=True)
        norms = np.sqrt((centred**2).sum(1))
        # Rounding of the mean leaves a residue in a flat region, which must not be normalized
        norms[still | (norms == 0)] = np.inf
        unit = (centred / norms[:, None]).astype(pairs.dtype)
        matrices = np.matmul(unit.transpose(0, 2, 1), unit).reshape(len(unit), -1)
        # With mode "clip", `take` writes into `pairs` without a buffer
        np.take(matrices, upper, axis=1, out=pairs[part], mode="clip")
    return np.clip(pairs, -1, 1, out=pairs)
