"""Camelyon17 as WILDS publishes it: patches of lymph node sections from five hospitals.

    metadata.csv   patient, node, x_coord, y_coord, tumor, slide, center, split, a row a patch
    patches/patient_004_node_4/patch_patient_004_node_4_x_3328_y_21792.png

The class is whether the middle 32x32 pixels of a patch of 96x96 hold tumour. A domain is a
hospital, "center0" to "center4" by the column `center`: 59436, 34904, 85054, 129838 and 146722
patches, 455,954 together, ten slides each.

TsmoBN (section 4.1, E.1) and UniFed (section 4.2) train on three hospitals and test on two as
unseen clients, "hospital4" and "hospital5", "following the source and target domains" of WILDS:
these train on centers 0, 3 and 4, validate on center 1 and test on center 2. TsmoBN cuts every
client to the size of the smallest (Table E.4 has it uncut) and divides each at random, patch by
patch, 80 to 20 into training and validation. UniFed names no cut.

References: Bandi et al., "From detection of individual metastases to classification of lymph node
status at the patient level: the CAMELYON17 challenge", IEEE TMI 2018; Koh et al., "WILDS: a
benchmark of in-the-wild distribution shifts", ICML 2021.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.decode import decode, hash_of_files
from fedjax_bn.data.seeds import hash_of
from fedjax_bn.data.sets.files import open_table
from fedjax_bn.data.sets.folders import IMAGENET
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Pool, Source, check_source

_COUNTS = (59_436, 34_904, 85_054, 129_838, 146_722)
_COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")
_UNSEEN = ("center1", "center2")
_WHERE = (
    "it must be the folder camelyon17_v1.0 of WILDS (wilds.stanford.edu, or "
    "wilds.get_dataset('camelyon17', download=True)), with metadata.csv and patches/"
)


class _Patch(NamedTuple):
    """A row of the table: the patch's file, and the columns used."""

    path: str
    tumor: int
    slide: int
    center: int
    split: int


def load_camelyon17(path: str | Path, *, image_size: int = 96, **options: Any) -> Source:
    """Returns Camelyon17 as u8[N, 96, 96, 3], two classes, five domains.

    Args:
      path: WILDS' folder, or the one that holds its `camelyon17_v1.0`.
      image_size: pixels a side; patches are resized if it is not 96.
      **options: `cache` (12.6 GB), `progress`, `max_megapixels` and `orientation` of `decode`.

    Returns:
      Source "camelyon17"; the group "unseen" is centers 1 and 2. Parts are those of WILDS: centers
      0, 3 and 4 by the column `split` (0 train, 1 validation), all of center 1 validation, all of
      center 2 test. Names are the patches' paths.

    Raises:
      FileNotFoundError: the table or patches are missing.
      ValueError: the table is damaged, or patches cannot be read.
    """
    roots = (Path(path, "camelyon17_v1.0"), Path(path))
    root = next((root for root in roots if (root / "metadata.csv").is_file()), roots[1])
    if not (root / "metadata.csv").is_file():
        raise FileNotFoundError(f"{root / 'metadata.csv'} is missing; {_WHERE}")
    patches = _read_table(root / "metadata.csv")
    slides = {patch.path.rpartition("/")[0] for patch in patches}
    # Listing folders is much faster than checking 455,954 files one by one.
    present = {f"{slide}/{file.name}" for slide in slides for file in (root / slide).glob("*")}
    if missing := [patch.path for patch in patches if patch.path not in present]:
        raise FileNotFoundError(
            f"{root} lacks {len(missing)} patches of its metadata.csv: {first_few(missing)}; "
            "unpack the archive again, or drop their rows"
        )
    counts, notes = np.bincount([patch.center for patch in patches], minlength=5), []
    if counts.tolist() != list(_COUNTS):
        notes.append(
            f"{root} has {counts.tolist()} patches of the centers, Camelyon17 {list(_COUNTS)}: a "
            "reduced copy, or another version of the WILDS data"
        )
    pools = []
    for center in np.flatnonzero(counts).tolist():
        rows = [patch for patch in patches if patch.center == center]
        files = [root / patch.path for patch in rows]
        images, converted = decode(files, image_size, root=root, **options)
        notes += [f"center{center}: {note}" for note in converted]
        names = np.array([patch.path for patch in rows])
        center_part = {1: VALIDATION, 2: TEST}.get(center)
        parts = [
            (TRAIN, VALIDATION)[patch.split] if center_part is None else center_part
            for patch in rows
        ]
        labels, parts = np.array([patch.tumor for patch in rows]), np.array(parts, np.int8)
        pools.append(Pool(f"center{center}", images, labels.astype(np.int32), names, parts))
    unseen = tuple(pool.name for pool in pools if pool.name in _UNSEEN)
    groups = {"unseen": unseen} if unseen else {}
    content = hash_of_files([root / patch.path for patch in patches], root, image_size)
    key = hash_of("camelyon17", patches, content)
    about = ("camelyon17", ("normal", "tumor"), tuple(pools), *IMAGENET)  # as WILDS normalizes
    return check_source(Source(*about, tuple(notes), groups, key))


def _read_table(path: Path) -> list[_Patch]:
    """Reads the rows of metadata.csv."""
    patches = []
    with open_table(path) as table:
        for row in table:
            numbers = {column: int(row[column]) for column in _COLUMNS}
            # Patient numbers have three digits, but a spreadsheet may have removed leading zeros.
            slide = "patient_{patient:03}_node_{node}".format(**numbers)
            place = "x_{x_coord}_y_{y_coord}".format(**numbers)
            values = (numbers[column] for column in _Patch._fields[1:])
            patch = _Patch(f"patches/{slide}/patch_{slide}_{place}.png", *values)
            if (
                patch.tumor not in (0, 1)
                or patch.center not in range(5)
                or patch.split not in (0, 1)
            ):
                raise ValueError(f"line {table.line_num}: {patch}")
            patches.append(patch)
    if not patches:
        raise ValueError(f"{path} has no rows; {_WHERE}")
    return patches
