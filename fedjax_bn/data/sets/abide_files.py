"""The files of ABIDE I: a phenotypic table, and a time series of brain regions for each subject."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.regular_files import Refused, read_text
from fedjax_bn.data.sets.tables import column_names, rows_of

_COLUMNS = ("FILE_ID", "SITE_ID", "DX_GROUP")
_LABELS = {"1": 1, "2": 0}  # DX_GROUP: 1 autism, 2 control
_REMEDY = (
    "fetch the table and one atlas' series from preprocessed-connectomes-project.org/abide, as "
    "fedjax_bn/data/sets/abide.py says"
)
_Table = dict[str, tuple[str, str]]


class Subject(NamedTuple):
    """One person: FILE_ID, SITE_ID, label (1 patient, 0 control) and series f64[T, R]."""

    name: str
    site: str
    label: int
    series: np.ndarray


def find_series(path: Path, atlas: str = "") -> dict[str, Path]:
    """FILE_ID -> its series, in or below a folder, of the named atlas or the one that there is.

    Raises:
      FileNotFoundError: there is no such folder, or no series in it.
      ValueError: there are several atlases and none is named, or two series of one subject.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"data.path {path} is no folder; {_REMEDY}")
    files: dict[str, Path] = {}
    twice, atlases = [], set()
    pattern = f"*_rois_{atlas or '*'}.1D"
    for file in sorted(path.rglob(pattern), key=lambda file: (file.name, file)):
        name, _, found = file.stem.rpartition("_rois_")
        atlases.add(found)
        if name in files:
            twice.append(str(file.relative_to(path)))
        files[name] = file
    if not files:
        wanted = f"FILE_ID_rois_{atlas or 'ATLAS'}.1D"
        raise FileNotFoundError(f"{path} has no {wanted} in or below it; {_REMEDY}")
    if len(atlases) > 1:
        raise ValueError(
            f"{path} has series of several atlases, {', '.join(sorted(atlases))}; say which with "
            "atlas"
        )
    if twice:
        raise ValueError(
            f"{path} has two series of one subject ({first_few(twice)}); keep those of one pipeline"
        )
    return files


def read_table(path: Path) -> _Table:
    """FILE_ID -> (SITE_ID, DX_GROUP) of the one table in a folder that has these columns.

    Raises:
      FileNotFoundError: there is none.
      ValueError: there are several, or it says two things of one subject.
    """
    tables = {}
    for file in sorted(path.glob("*.csv")):
        if {*_COLUMNS} <= {*column_names(file)}:
            tables[file] = [tuple(row.values()) for _, row in rows_of(file, _COLUMNS)]
    if not tables:
        raise FileNotFoundError(
            f"{path} has no .csv with the columns {', '.join(_COLUMNS)}; {_REMEDY}"
        )
    if len(tables) > 1:
        raise ValueError(
            f"{path} has several phenotypic tables, {', '.join(file.name for file in tables)}; "
            "keep one"
        )
    ((file, rows),) = tables.items()
    found: _Table = {}
    differ = []
    for name, site, group in rows:
        if name in ("", "no_filename"):
            continue
        group = group.removesuffix(".0")  # of tables that pandas wrote
        if found.setdefault(name, (site, group)) != (site, group):
            differ.append(name)
    if differ:
        raise ValueError(f"{file} contradicts itself on {first_few(differ)}; fetch it again")
    return found


def series_of_sites(files: dict[str, Path], table: _Table, sites: Sequence[str]) -> dict[str, Path]:
    """The series of the sites (of all, if none is given), every one with a row and a diagnosis.

    Raises:
      ValueError: a series has no row in the table, a site has no series, or a DX_GROUP is unknown.
    """
    lost = [name for name in files if name not in table]
    if lost:
        raise ValueError(
            f"the phenotypic table has no row for {first_few(lost)}, whose series are there; add "
            "rows with their FILE_ID, SITE_ID and DX_GROUP, or move the series away"
        )
    known = sorted({table[name][0] for name in files})
    unknown = [site for site in sites if site not in known]
    if unknown:
        raise ValueError(
            f"there are no series of the site {', '.join(unknown)}; sites with series are "
            f"{', '.join(known)}"
        )
    chosen = {name: f for name, f in files.items() if not sites or table[name][0] in sites}
    odd = [f"{name} ({table[name][1]!r})" for name in chosen if table[name][1] not in _LABELS]
    if odd:
        raise ValueError(
            f"the phenotypic table has a DX_GROUP other than 1 (patient) and 2 (control) for "
            f"{first_few(odd)}; correct it, or move their series away"
        )
    return chosen


def read_subjects(files: dict[str, Path], table: _Table, window: int) -> list[Subject]:
    """All series, parsed; all files are read before a fault is reported.

    Raises:
      ValueError: series are malformed, differ in regions, or are shorter than `window` frames.
    """
    subjects, faults = [], []
    for name, file in files.items():
        try:
            series = _read_series(file)
        except ValueError as error:
            reason = error.strerror if isinstance(error, Refused) else error
            faults.append(f"{file.name} ({reason})")
            continue
        site, group = table[name]
        subjects.append(Subject(name, site, _LABELS[group], series))
    if faults:
        raise ValueError(f"cannot read the series {first_few(faults)}; fetch them again")
    widths = [subject.series.shape[1] for subject in subjects]
    usual = max(sorted(set(widths)), key=widths.count)
    odd = [
        f"{subject.name} ({width})"
        for subject, width in zip(subjects, widths, strict=True)
        if width != usual
    ]
    if odd:
        raise ValueError(
            f"series must have the {usual} regions that most have, but others have "
            f"{first_few(odd)}; take all series of one atlas"
        )
    short = [f"{s.name} ({len(s.series)})" for s in subjects if len(s.series) < window]
    if short:
        raise ValueError(
            f"windows of {window} frames do not fit into {first_few(short)}; choose a smaller "
            "window, or 0 for whole series"
        )
    return subjects


def _read_series(path: Path) -> np.ndarray:
    """One `.1D` file, a header line and T rows of R numbers, as f64[T, R].

    Raises:
      ValueError: it has no header, fewer than two rows or regions, rows of different lengths, or
        something that is no finite number; the message does not name the file.
    """
    header, *lines = read_text(path, errors="replace").splitlines() or [""]
    if header and _are_numbers(header.split()):
        raise ValueError("its first line is no header")
    rows = [line for line in lines if line.strip()]
    lengths = {len(row.split()) for row in rows}
    if len(rows) < 2 or lengths == {1}:
        raise ValueError(f"it has {len(rows)} frames of {max(lengths, default=0)} regions")
    if len(lengths) > 1:
        raise ValueError(f"its rows have {min(lengths)} to {max(lengths)} numbers")
    try:
        series = np.loadtxt(rows, np.float64, comments=None)
    except ValueError:
        raise ValueError("it holds something that is no number") from None
    if not np.isfinite(series).all():
        raise ValueError("it holds a number that is not finite")
    return series


def _are_numbers(words: list[str]) -> bool:
    try:
        np.array(words, np.float64)
    except ValueError:
        return False
    return True
