"""Makes slices of scans without masks, as `volumes` does for training, and scans of their masks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.masks.volumes import (
    NEIGHBOURS,
    Slices,
    grid_of,
    open_volume,
    squared,
    to_bytes,
    turned_back,
    voxels_of,
)
from fedjax_bn.data.sets.files import corruption_named


def shape_of(path: Path, slices: Slices) -> tuple[tuple[int, int, int], float]:
    """Returns slices, rows and columns of a NIfTI volume, and a voxel's size in millilitres.

    Raises:
      ImportError: nibabel is not installed.
      ValueError: the file is not such a volume, or its slices are smaller than the crop.
    """
    with corruption_named(path):
        grid = grid_of(open_volume(path), slices.plane)
        columns, rows, depth = grid.shape
        if slices.crop > min(rows, columns):
            raise ValueError(
                f"its slices of {rows} x {columns} pixels are below the crop's {slices.crop}"
            )
        return (depth, rows, columns), float(abs(np.linalg.det(grid.affine))) / 1000


def slices_of(path: Path, slices: Slices) -> np.ndarray:
    """Returns the slices u8[D, size, size, 3] of a NIfTI volume; raises as `shape_of`."""
    with corruption_named(path):
        turn = grid_of(open_volume(path), slices.plane).turn
        grey = to_bytes(voxels_of(path, turn), slices.window)
        # The stretching of images and masks is one function, here with an empty mask.
        stored = np.stack([squared(slice_, np.zeros_like(slice_), slices)[0] for slice_ in grey])
    index, steps = np.arange(len(stored)), (0, 0, 0)
    if slices.channels == NEIGHBOURS:
        steps = (-1, 0, 1)
    return np.stack([stored[np.clip(index + step, 0, index[-1])] for step in steps], -1)


def uncropped(mask: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the mask u8[H, W] of a slice whose middle has the mask [h, w]; 0 around it."""
    around = [(side - part) // 2 for side, part in zip(shape, mask.shape, strict=True)]
    width = [
        (before, side - part - before)
        for before, side, part in zip(around, shape, mask.shape, strict=True)
    ]
    return np.pad(mask, width)


def save_mask(path: Path, mask: np.ndarray, image: Path, plane: str) -> None:
    """Writes classes u8[D, H, W] as a NIfTI volume with the header and the axes of its image.

    Raises:
      ValueError: the image cannot be read.
      OSError: the file cannot be written.
    """
    with corruption_named(image):
        volume = open_volume(image)
        turn = grid_of(volume, plane).turn
    header = volume.header.copy()
    header.set_data_dtype(np.uint8)
    header["cal_min"] = header["cal_max"] = 0  # else viewers show classes in the image's window
    type(volume)(turned_back(mask, turn), volume.affine, header).to_filename(path)
