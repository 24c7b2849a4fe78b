"""Makes slices of scans in NIfTI, each a volume with a mask of its shape, and their labels.

Axes are exchanged and mirrored, without resampling, so that in every volume columns run to the
right, rows to the front and slices to the top, as near as the header's affine allows (`plane` has
other slices). A volume that is stored so gives the slices of HarmoFL's code (Jiang et al. 2022).
Intensities are clipped to the smallest one and the 99 % quantile of the whole volume (if these are
equal, to the greatest), or to `window`, and stretched to bytes, which are rounded down. The three
channels are a slice between its two neighbours, the first and the last slice being their own, or
three times the slice.
"""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.arguments.text import first_few
from fedjax_bn.data.masks.assemble import Pair
from fedjax_bn.data.sets.files import corruption_named

NEIGHBOURS, REPEATED = "neighbours", "repeated"
# Where columns, rows and slices run: to the right, the anterior or the superior.
_PLANES = {"axial": "RAS", "coronal": "RSA", "sagittal": "ASR"}
AXIAL = next(iter(_PLANES))
_QUANTILE = 0.99
_MILLIMETRES = {1: 1000.0, 2: 1.0, 3: 0.001}  # of NIfTI's codes for metre, millimetre and micron
_SHIFT = 0.1  # voxels by which the places of an image and its mask may differ
_ROUNDING = 1e-3  # by which resampling and scaling may change a label


class Slices(NamedTuple):
    """The conversion of volumes into square slices, see `assemble.Conversion`."""

    image_size: int  # pixels a side
    channels: str = NEIGHBOURS  # "neighbours" or "repeated"
    crop: int = 0  # pixels a side of the square cut out of a slice's middle; 0 for the whole slice
    plane: str = AXIAL  # of the slices: "axial", "coronal" or "sagittal"
    # (low, high), the intensities in the file's units that become 0 and 255, such as -160 and 240
    # in CT; () for those of each volume
    window: tuple[float, ...] = ()

    numbered = True
    constants = ((0.0,) * 3, (1.0,) * 3)  # images reach a model as u8/255
    threads = 4  # each of which has a volume of f64

    @property
    def form(self) -> str:
        """All fields, which change the slices."""
        return f"slices-{tuple(self)}"

    def look(self, pair: Pair) -> tuple[int, np.ndarray]:
        """Reads both headers and the mask."""
        grid, _, _ = _grids_of(pair, self)
        return grid.shape[2], np.bincount(_mask_of(pair.mask).ravel(), minlength=256) > 0

    def convert(self, pair: Pair, table: np.ndarray) -> tuple[np.ndarray, str]:
        """Reads both files; the result is the name of a mask that is not where its image is."""
        grid, mask_turn, is_aligned = _grids_of(pair, self)
        images = _images_of(pair.image, grid, self)
        mask = table[_turned(_mask_of(pair.mask), mask_turn)]
        masks = np.stack([_squared(plane, self, "NEAREST") for plane in mask])
        return np.concatenate([images, masks[..., None]], -1), str(pair.mask) * (not is_aligned)

    def describe(self, misplaced: Sequence[str]) -> tuple[str, ...]:
        """Names masks that are not where their image is."""
        masks = first_few([mask for mask in misplaced if mask], 3)
        note = f"masks with another place in space than their image: {masks}; voxels "
        return (note + "belong together by their order in the file",) if masks else ()

    def spacing(self, pair: Pair) -> tuple[float, float, float]:
        """Returns the spacing of the stored slices, by the header's affine and unit."""
        grid = _grid_of(pair.image, self)
        across, down, between = np.sqrt((grid.affine[:3, :3] ** 2).sum(0)).tolist()
        columns, rows, _ = grid.shape
        # Stretching changes the side of a pixel, which the distances between surfaces need.
        down = down * (self.crop or rows) / self.image_size
        return between, down, across * (self.crop or columns) / self.image_size


class _Grid(NamedTuple):
    """The voxels of a volume along columns, rows and slices, in this order."""

    shape: tuple[int, int, int]
    affine: np.ndarray  # f64[4, 4], from a voxel's indices to its place in millimetres
    turn: np.ndarray  # f64[3, 2], nibabel's orientation from the file's axes to this order


def is_volume(name: str) -> bool:
    """Returns whether a file of this name is a NIfTI volume, and not a hidden file."""
    return name.lower().endswith((".nii", ".nii.gz")) and not name.startswith(".")


def shape_of(path: Path, slices: Slices) -> tuple[tuple[int, int, int], float]:
    """Returns slices, rows and columns of a NIfTI volume, and a voxel's size in millilitres."""
    grid = _grid_of(path, slices)
    return grid.shape[::-1], float(abs(np.linalg.det(grid.affine))) / 1000


def slices_of(path: Path, slices: Slices) -> np.ndarray:
    """Returns the slices u8[D, size, size, 3] of a NIfTI volume."""
    return _images_of(path, _grid_of(path, slices), slices)


def uncropped(mask: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the mask u8[H, W] of a slice whose middle has the mask [h, w]; 0 around it."""
    full = np.zeros(shape, mask.dtype)
    _middle(full, mask.shape)[:] = mask
    return full


def save_mask(path: Path, mask: np.ndarray, image: Path, plane: str) -> None:
    """Writes classes u8[D, H, W] as a NIfTI volume with the header and the axes of its image."""
    from nibabel.orientations import apply_orientation, axcodes2ornt, ornt_transform

    volume, turn = _open(image), _grid_of(image, Slices(1, plane=plane)).turn
    header = volume.header.copy()
    header.set_data_dtype(np.uint8)
    header["cal_min"] = header["cal_max"] = 0  # else viewers show classes in the image's window
    voxels = apply_orientation(mask.T, ornt_transform(axcodes2ornt("RAS"), turn))
    type(volume)(voxels, volume.affine, header).to_filename(path)


def _open(path: Path) -> Any:
    """Returns a volume of nibabel, of which only the header is read yet."""
    try:
        import nibabel
    except ImportError as error:
        raise ImportError(f"{path} needs nibabel: pip install 'fedjax_bn[nifti]'") from error
    return nibabel.load(path)


def _grid_of(path: Path, slices: Slices) -> _Grid:
    """Returns the grid of a volume, with the slices of a plane."""
    # The place is that of the affine (`sform`, else `qform`, else `pixdim`) in the header's unit,
    # or in millimetres if it has none.
    with corruption_named(path):
        volume = _open(path)
        from nibabel import orientations

        affine = np.array(volume.affine, np.float64)
        # The last three bits are the unit of length; the others are those of time.
        affine[:3] *= _MILLIMETRES.get(int(volume.header["xyzt_units"]) & 7, 1.0)
        has_axes = np.isfinite(affine).all() and np.linalg.matrix_rank(affine[:3, :3]) == 3
        if len(volume.shape) != 3 or not has_axes:
            axes = f"the affine {affine.tolist()}" if len(volume.shape) == 3 else volume.shape
            raise ValueError(f"it has no three axes, but {axes}: save one volume, with its affine")
        # The nearest axes, so that no voxel is resampled.
        turn = orientations.ornt_transform(
            orientations.io_orientation(affine), orientations.axcodes2ornt(_PLANES[slices.plane])
        )
        shape = tuple(volume.shape[axis] for axis in np.argsort(turn[:, 0]))
        if slices.crop > min(shape[:2]):
            raise ValueError(f"its slices of {shape[:2]} pixels are below the crop's {slices.crop}")
        return _Grid(shape, affine @ orientations.inv_ornt_aff(turn, volume.shape), turn)


def _grids_of(pair: Pair, slices: Slices) -> tuple[_Grid, np.ndarray, bool]:
    """Returns a volume's grid, its mask's turn, and whether both have the same place in space."""
    grid, mask_grid = _grid_of(pair.image, slices), _grid_of(pair.mask, slices._replace(crop=0))
    if grid.shape == mask_grid.shape:
        # Two affine maps that agree at the corners agree at every voxel between them.
        ends = np.array(grid.shape)[:, None] - 1
        corners = np.vstack([ends * np.indices((2, 2, 2)).reshape(3, 8), np.ones(8)])
        shift = np.linalg.solve(grid.affine, mask_grid.affine @ corners) - corners
        if (np.abs(shift) < _SHIFT).all():
            return grid, mask_grid.turn, True
    shape, mask_shape = _open(pair.image).shape, _open(pair.mask).shape
    if mask_shape != shape:
        raise ValueError(f"{pair.mask} has the shape {mask_shape}, its image has {shape}")
    # A mask without its image's affine has the order of its voxels, not its own axes.
    return grid, grid.turn, False


def _images_of(path: Path, grid: _Grid, slices: Slices) -> np.ndarray:
    """Returns u8[D, S, S, 3], the squares of a volume's slices."""
    voxels = _read(path, np.float64)
    if not np.isfinite(voxels).all():
        raise ValueError(f"{path} has voxels that are not finite; replace them")
    # The quantile, because a few bright voxels (metal, vessels) would darken all else.
    low, high = slices.window or (voxels.min(), np.quantile(voxels, _QUANTILE))
    if high == low:
        high = voxels.max()
    # A volume of one intensity becomes 0.
    shares = (np.clip(voxels, low, high) - low) / ((high - low) or 1)
    planes = _turned((255 * shares).astype(np.uint8), grid.turn)
    stored = np.stack([_squared(plane, slices, "BILINEAR") for plane in planes])
    if slices.channels == REPEATED:
        return np.stack([stored] * 3, -1)
    # The first and the last slice are their own neighbours.
    padded = np.pad(stored, ((1, 1), (0, 0), (0, 0)), mode="edge")
    return np.stack([padded[:-2], stored, padded[2:]], -1)


def _mask_of(path: Path) -> np.ndarray:
    """Returns the values u8[X, Y, Z] of a mask."""
    voxels = _read(path)
    with np.errstate(invalid="ignore"):  # for NaN
        mask = np.clip(np.rint(voxels), 0, 255).astype(np.uint8)
        changed = ~(np.abs(voxels - mask.astype(float)) <= _ROUNDING)
    if changed.any():
        value = f"{voxels[changed][0]:g}; labels are whole numbers 0 to 255"
        raise ValueError(f"{path} has the value {value}: resample masks to the nearest value")
    return mask


def _read(path: Path, dtype: Any = None) -> np.ndarray:
    """Returns the numbers [X, Y, Z] of a file, scaled by its header."""
    with corruption_named(path):
        content = path.read_bytes()
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(content)  # whole, because its checksum is at the end
        return np.asarray(type(_open(path)).from_bytes(content).dataobj, dtype)


def _turned(array: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Returns the array [X, Y, Z] of a file as slices [D, H, W]."""
    from nibabel.orientations import apply_orientation

    return apply_orientation(array, turn).T


def _middle(plane: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the view [h, w] of a slice's middle."""
    row, column = ((side - part) // 2 for side, part in zip(plane.shape, shape, strict=True))
    return plane[row : row + shape[0], column : column + shape[1]]


def _squared(plane: np.ndarray, slices: Slices, resampling: str) -> np.ndarray:
    """Returns u8[size, size] of a slice u8[H, W], cut and stretched."""
    from PIL import Image

    if slices.crop:
        plane = _middle(plane, (slices.crop, slices.crop))
    size = (slices.image_size, slices.image_size)
    return np.asarray(Image.fromarray(plane).resize(size, Image.Resampling[resampling]))
