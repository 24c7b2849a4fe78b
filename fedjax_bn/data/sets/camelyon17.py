"""Camelyon17 as WILDS publishes it: patches of lymph node sections from five hospitals.

    metadata.csv   patient, node, x_coord, y_coord, tumor, slide, center, split, a row a patch
    patches/patient_004_node_4/patch_patient_004_node_4_x_3328_y_21792.png

The class is whether the middle 32x32 pixels of a patch of 96x96 hold tumour. A domain is a
hospital, "center0" to "center4" by the column `center`, with ten slides each. WILDS trains on
centers 0, 3 and 4, validates on center 1 and tests on center 2; these two are the unseen
"hospital4" and "hospital5" of TsmoBN and UniFed (`configs/camelyon17.py`).

References: Bandi et al., IEEE TMI 2019; Koh et al., "WILDS", ICML 2021.
"""

from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.sets.files import open_table
from fedjax_bn.data.sets.folders import Listing, Published, folder_source
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Source

_COUNTS = (59_436, 34_904, 85_054, 129_838, 146_722)
_PARTS = {1: VALIDATION, 2: TEST}  # of centers that do not train
_CAMELYON17 = Published(
    name="camelyon17",
    classes={"normal": (), "tumor": ()},
    counts={f"center{k}": count for k, count in enumerate(_COUNTS)},
    where="it must be the folder camelyon17_v1.0 of wilds.stanford.edu",
)


def load_camelyon17(path: str | Path, *, image_size: int = 96, **options: Any) -> Source:
    """Returns Camelyon17 as u8[N, 96, 96, 3], two classes, five domains, normalized as WILDS does.

    Parts are those of WILDS: centers 0, 3 and 4 by the column `split` (0 train, 1 validation), all
    of center 1 validation, all of center 2 test; these two are the group "unseen".
    A cache has 12.6 GB.
    """
    root = Path(path, "camelyon17_v1.0")
    root = root if root.is_dir() else Path(path)
    if not (root / "metadata.csv").is_file():
        raise FileNotFoundError(f"{root / 'metadata.csv'} is missing; {_CAMELYON17.where}")
    centers: dict[int, list[tuple[Path, int, int]]] = {}
    with open_table(root / "metadata.csv") as table:
        for row in table:
            # Patient numbers have three digits, but a spreadsheet may have removed leading zeros.
            slide = f"patient_{int(row['patient']):03}_node_{row['node']}"
            file = root / f"patches/{slide}/patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"
            center, part = int(row["center"]), (TRAIN, VALIDATION)[int(row["split"])]
            patch = file, int(row["tumor"]), _PARTS.get(center, part)
            centers.setdefault(center, []).append(patch)
    listings = []
    for center in sorted(centers):
        files, labels, parts = zip(*centers[center], strict=True)
        arrays = np.array(labels, np.int32), np.array(parts, np.int8)
        listings.append(Listing(f"center{center}", list(files), *arrays))
    source = folder_source(_CAMELYON17, root, listings, image_size, **options)
    unseen = tuple(f"center{center}" for center in _PARTS if center in centers)
    return source._replace(groups={"unseen": unseen} if unseen else {})
