"""Tiny scans in NIfTI, and folders of images and masks in published layouts, written by a test."""

import numpy as np
from PIL import Image

SITES = ("RUNMC", "BMC", "I2CVB", "UCL", "BIDMC", "HK")
SHAPE = (12, 16, 6)  # columns, rows and slices, as NIfTI stores them


def write_volume(path, array, zooms=(0.5, 0.75, 3.0)):
    """Writes an array [X, Y, Z] of any dtype."""
    import nibabel

    image = nibabel.Nifti1Image(array, np.diag([*zooms[: array.ndim], 1.0][:3] + [1.0]))
    image.header.set_zooms((*zooms, *(1.0,) * (array.ndim - 3)))
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image, path)
    return path


def voxels(seed=0, shape=SHAPE):
    noise = np.random.default_rng(seed).integers(0, 1000, 997)
    return np.resize(noise, shape).astype(np.int16)  # it repeats, so that it is packed quickly


def mask(shape=SHAPE, labels=(1, 2)):
    """The prostate is in all slices but the first two, and the last."""
    array = np.zeros(shape, np.uint8)
    array[3:8, 4:10, 2:-1] = labels[0]
    array[5:8, 6:10, 2:-1] = labels[-1]
    return array


def write_prostate(root, cases=3, sites=SITES, shape=SHAPE):
    """Six sites of `cases` patients, BMC with a capital letter as it is published."""
    for number, site in enumerate(sites):
        end = "_Segmentation" if site == "BMC" else "_segmentation"
        for case in range(cases):
            stem = f"{root}/{site}/Case{case:02}"
            write_volume(root / f"{stem}.nii.gz", voxels(10 * number + case, shape))
            write_volume(root / f"{stem}{end}.nii.gz", mask(shape))
    return root


def write_pairs(folder, images, masks, names, values):
    """Images of noise, and masks whose rows have the values in bands."""
    rng = np.random.default_rng(0)
    band = np.repeat(np.array(values, np.uint8), 4)[:, None]
    grey = np.broadcast_to(band, (len(band), 10))
    for place in (images, masks):
        (folder / place).mkdir(parents=True, exist_ok=True)
    for name in names:
        noise = rng.integers(0, 256, (*grey.shape, 3)).astype(np.uint8)
        Image.fromarray(noise).save(folder / images / f"{name}.png")
        Image.fromarray(np.ascontiguousarray(grey)).save(folder / masks / f"{name}.png")
