"""Prostate in T2 MRI of six sites (Liu, Dou, Heng, MICCAI 2020, "SAML").

    BIDMC/Case00.nii.gz  BIDMC/Case00_segmentation.nii.gz  ...  BMC/Case00_Segmentation.nii.gz  ...

HarmoFL's code calls the sites RUNMC and BMC ISBI and ISBI_1.5. Labels 1 and 2 are joined. Slices
have 384 x 384 pixels in the published files; `volumes` has how they become images. A protocol, of
those that docs/datasets.md describes, divides patients or slices once and for all, in an order that
is drawn from a fixed seed: HarmoFL's own order is not read.

References: Jiang, Wang, Dou, "HarmoFL", AAAI 2022; Zhu et al., "FL-MedSegBench", arXiv 2603.11659.
"""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fedjax_bn.data.division.choices import PROTOCOLS
from fedjax_bn.data.labels import MASK, VOLUME, take
from fedjax_bn.data.masks.assemble import Pair, paired_source
from fedjax_bn.data.masks.mask_folders import pair_files, stem_of
from fedjax_bn.data.masks.volumes import AXIAL, REPEATED, Slices, is_volume
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.sets.folders import Aliases, Published, domain_folders
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Pool, Source, check_source

_SITES: Aliases = MappingProxyType(
    {"RUNMC": ("ISBI",), "BMC": ("ISBI_1.5",), "I2CVB": (), "UCL": (), "BIDMC": (), "HK": ()}
)
_CLASSES = ("background=0", "prostate=1+2")
_WHERE = (
    "it must hold the folders RUNMC, BMC, I2CVB, UCL, BIDMC and HK, or data.domains, with "
    "CaseNN.nii.gz and CaseNN_segmentation.nii.gz (liuquande.github.io/SAML)"
)
_NOTES = {
    "harmofl": "data.protocol=harmofl divides slices, as HarmoFL's code does: those of one patient "
    "train, validate and test, so that scores are not those of new patients",
    "fl_medsegbench": "data.protocol=fl_medsegbench divides patients, 70, 10, 20 %, in our order",
}


def load_prostate(
    path: str | Path | None,
    *,
    image_size: int = 384,
    protocol: str = "",
    domains: Sequence[str] = (),
    plane: str = AXIAL,
    window: Sequence[float | str] = (),
    **options: Any,
) -> Source:
    """Returns the source "prostate", slices u8[N, image_size, image_size, 3] with their masks.

    Slices are named by their patient; with "harmofl", each has its own name. The parts of a
    protocol, see above, are the official ones. `domains` are sites, empty for all; `plane` and
    `window` are as in `volumes.Slices`, the options `cache` and `progress` as in `pixels.decode`.
    """
    sites = {name: _SITES.get(name, ()) for name in domains or _SITES}
    root, folders = domain_folders(path, Published("prostate", domains=sites, where=_WHERE))
    pairs = {}
    for site, folder in folders.items():
        images, masks = {}, {}
        for file in sorted(file for file in folder.iterdir() if is_volume(file.name)):
            # BMC writes _Segmentation, the others _segmentation.
            case, ending, _ = stem_of(file).lower().partition("_segmentation")
            (masks if ending else images)[file] = case
        pairs[site] = [
            Pair(image, mask, image.relative_to(root).as_posix())
            for image, mask in pair_files(images, masks, folder, _WHERE)
        ]
    how = prostate_slices(protocol, image_size, plane, window), _CLASSES
    source = paired_source("prostate", root, pairs, *how, **options)
    if not protocol:
        return source
    pools = tuple(_divided(pool, protocol) for pool in source.pools)
    notes, key = (_NOTES[protocol], *source.notes), f"{protocol} {source.key}"
    return check_source(source._replace(pools=pools, notes=notes, key=key))


def prostate_slices(
    protocol: str, image_size: int, plane: str = AXIAL, window: Sequence[float | str] = ()
) -> Slices:
    """Returns how volumes become slices with a protocol, "" for none."""
    slices = Slices(image_size, plane=plane, window=tuple(map(float, window)))
    return slices._replace(channels=REPEATED, crop=256) if protocol == PROTOCOLS[2] else slices


def _divided(pool: Pool, protocol: str) -> Pool:
    """Returns a site's slices with a label, with the parts of a protocol."""
    keep = pool.labels[MASK].any((1, 2))
    # The ends of a volume are left out too, as HarmoFL's code does.
    ends = np.flatnonzero(np.diff(pool.labels[VOLUME]))
    keep[[0, *ends, *(ends + 1), -1]] = False
    labels, names = take(pool.labels, keep), pool.names[keep]
    if protocol == "harmofl":
        # A part of the slices has gaps and is not a body, so each slice is scored alone.
        del labels[VOLUME]
        group, count = np.arange(len(names)), len(names)
        names = np.array([f"{name}/{k:05}" for k, name in enumerate(names)])
        training, validating = 64 * count // 100, 80 * count // 100
    else:
        patients, group = np.unique(labels[VOLUME], return_inverse=True)
        count = len(patients)
        training, validating = 7 * count // 10, 7 * count // 10 + count // 10
    # By the site's number, so that a choice of sites does not change their parts.
    order = generator(0, list(_SITES).index(pool.name)).permutation(count)
    parts = np.full(count, TEST, np.int8)
    parts[order[:validating]] = VALIDATION
    parts[order[:training]] = TRAIN
    return Pool(pool.name, pool.images[keep], labels, names, parts[group])
