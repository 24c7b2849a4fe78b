"""Makes slices of scans in NIfTI, each a volume with a mask of its shape, and their labels.

Axes are exchanged and mirrored, without resampling, so that in every volume columns run to the
right, rows to the front and slices to the top, as near as the header's affine allows (`plane` has
other slices). A volume that is stored so gives the slices of HarmoFL's code (Jiang et al. 2022).
Intensities are clipped to the smallest one and the 99 % quantile of the whole volume, or to
`window`, and stretched to bytes, which are rounded down. Slices are cut to a square in their middle
if `crop` is set, and stretched to squares: images bilinear, masks to the nearest value.

The three channels of an image are a slice between its two neighbours, the first and the last slice
being their own neighbours, or three times the slice.
"""

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.label_trees import MASK, SPACING, VOLUME
from fedjax_bn.data.masks.assemble import Pair
from fedjax_bn.data.masks.values import absent_classes, classes_of
from fedjax_bn.data.messages import first_few, in_threads
from fedjax_bn.data.pixels.cache import Write, cached_array, cached_numbers
from fedjax_bn.data.pixels.decode import hash_of_files
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.source import Pool, Source, check_source
from fedjax_bn.engine.inputs import UNLABELLED

SUFFIXES = (".nii", ".nii.gz")
CHANNELS = NEIGHBOURS, REPEATED = "neighbours", "repeated"
# Where columns, rows and slices run: to the right, the anterior or the superior.
PLANES = {"axial": "RAS", "coronal": "RSA", "sagittal": "ASR"}
AXIAL = next(iter(PLANES))
_QUANTILE = 0.99
_THREADS = 4  # each of which has a volume of f64
_FORM = 3  # raise it when the same files would give other slices
_MILLIMETRES = {1: 1000.0, 2: 1.0, 3: 0.001}  # of NIfTI's codes for metre, millimetre and micron
_SHIFT = 0.1  # voxels by which the places of an image and its mask may differ
_ROUNDING = 1e-3  # by which resampling and scaling may change a label


class Slices(NamedTuple):
    """The conversion of volumes into square slices.

    Attributes:
      image_size: pixels a side.
      channels: "neighbours" or "repeated", see above.
      labelled: whether slices whose mask is background alone are left out, as are the first and the
        last of a volume.
      crop: pixels a side of the square that is cut out of a slice's middle; 0 for the whole slice.
      plane: of the slices: "axial", "coronal" or "sagittal".
      window: (low, high), the intensities in the file's units that become 0 and 255, such as -160
        and 240 in CT; () for those of each volume, see above.
      cache, progress: see `pixels.decode`.
    """

    image_size: int
    channels: str = NEIGHBOURS
    labelled: bool = False
    crop: int = 0
    plane: str = AXIAL
    window: tuple[float, ...] = ()
    cache: str | Path | None = None
    progress: bool = True


class Grid(NamedTuple):
    """The voxels of a volume along columns, rows and slices, in this order.

    Attributes:
      shape: their numbers.
      affine: f64[4, 4], from a voxel's indices to its place in millimetres.
      turn: f64[3, 2], nibabel's orientation, which brings the file's axes into this order.
    """

    shape: tuple[int, int, int]
    affine: np.ndarray
    turn: np.ndarray

    @property
    def sides(self) -> np.ndarray:
        """f64[3], millimetres between the centres of neighbours."""
        return np.sqrt((self.affine[:3, :3] ** 2).sum(0))


class _Form(NamedTuple):
    """What the headers of a volume and its mask say.

    Attributes:
      grid: of the volume.
      mask_turn: as `Grid.turn`, of the mask.
      aligned: whether both have the same place in space.
      spacing: millimetres between slices, rows and columns as they are stored, that is, stretched.
    """

    grid: Grid
    mask_turn: np.ndarray
    aligned: bool
    spacing: tuple[float, float, float]


def is_volume(name: str) -> bool:
    """Returns whether a file of this name is a NIfTI volume, and not a hidden file."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def to_source(
    name: str,
    root: Path,
    domains: Mapping[str, Sequence[Pair]],
    slices: Slices,
    *,
    classes: Sequence[str] = (),
    values: Mapping[int, int] | None = None,
    notes: Sequence[str] = (),
) -> Source:
    """Returns the slices u8[N, size, size, 3] of all domains.

    Labels are masks u8[N, size, size], `volume` i32[N], and `spacing` f32[N, 3] in millimetres by
    the header's affine and unit, of the slices as they are stored. Images reach a model as u8/255.

    Args:
      name: of the dataset.
      root: folder of the files, to which their names are relative.
      domains: name -> its volumes and their masks, at least one each.
      slices: how volumes become slices.
      classes, values, notes: as in `assemble.to_source`.

    Raises:
      ImportError: nibabel is not installed.
      ValueError: a file cannot be read, a volume does not have three axes, a mask has another shape
        than its image or unknown values, or no slice is kept.
      OSError: a file is missing, or the cache cannot be written.
    """
    pairs = [pair for members in domains.values() for pair in members]
    owners = [domain for domain, members in domains.items() for _ in members]
    files, masks = [file for pair in pairs for file in pair[:2]], [pair.mask for pair in pairs]
    forms = [_form_of(pair, slices) for pair in pairs]
    present = _values_of(masks, root, slices)
    paths = list(map(str, masks))
    classes, table, values_note = classes_of(present, owners, paths, classes, values)
    ends = np.cumsum([0, *(form.grid.shape[2] for form in forms)])
    pixels, padding_notes = _slices_of(pairs, forms, ends, root, slices, table)
    spacing = np.array([form.spacing for form in forms], np.float32)
    names = np.array([pair.name for pair in pairs])
    pools = []
    for domain in domains:
        numbers = [number for number, owner in enumerate(owners) if owner == domain]
        rows = [ends[k] + _chosen(pixels[ends[k] : ends[k + 1], 1], slices) for k in numbers]
        volume = np.repeat(np.array(numbers, np.int32), list(map(len, rows)))
        index, lowest, highest = np.concatenate(rows), ends[volume], ends[volume + 1] - 1
        steps = (-1, 0, 1) if slices.channels == NEIGHBOURS else (0, 0, 0)
        # The first and the last slice of a volume are their own neighbours.
        images = [pixels[np.clip(index + step, lowest, highest), 0] for step in steps]
        labels = {MASK: pixels[index, 1], VOLUME: volume, SPACING: spacing[volume]}
        parts = [pairs[k].part for k in volume]
        official = None if None in parts else np.array(parts, np.int8)
        pools.append(Pool(domain, np.stack(images, -1), labels, names[volume], official))
    sizes = ", ".join(f"{domain} {len(members)}" for domain, members in domains.items())
    left_out = len(pixels) - sum(len(pool.images) for pool in pools)
    notes = [
        *notes,
        f"{len(pairs)} scans ({sizes}) with {len(pixels)} slices, of which {left_out} left out",
    ]
    if misplaced := [
        str(mask) for mask, form in zip(masks, forms, strict=True) if not form.aligned
    ]:
        notes.append(
            f"masks with another place in space than their image: {first_few(misplaced, 3)}; "
            "voxels belong together by their order in the file"
        )
    notes += [*_about_planes(pairs, forms, slices.plane), *padding_notes, values_note]
    notes += absent_classes(present, owners, classes, table)
    conversion = repr(slices[: slices._fields.index("cache")])
    key = f"{conversion} {hash_of_files(files, root, 0)}"
    mean, std = (0.0,) * 3, (1.0,) * 3
    return check_source(Source(name, classes, tuple(pools), mean, std, tuple(notes), key=key))


def open_volume(path: Path) -> Any:
    """Returns a volume of nibabel, of which only the header is read yet."""
    try:
        import nibabel
    except ImportError as error:
        raise ImportError(
            f"{path} is a NIfTI volume, which needs nibabel, which is not installed: "
            "pip install 'fedjax_bn[nifti]'"
        ) from error
    volume = nibabel.load(path)
    if len(volume.shape) != 3:
        raise ValueError(f"it has the shape {volume.shape}, not three axes: save one volume of it")
    return volume


def grid_of(volume: Any, plane: str) -> Grid:
    """Returns the grid of a volume of nibabel, with slices in a plane.

    The place is that of the affine (`sform`, else `qform`, else `pixdim`) in the header's unit, or
    in millimetres if it has none.

    Raises:
      ValueError: the affine has numbers that are not finite, or axes without three directions.
    """
    from nibabel import orientations

    affine = np.array(volume.affine, np.float64)
    affine[:3] *= _MILLIMETRES.get(int(volume.header["xyzt_units"]) & 7, 1.0)
    if not np.isfinite(affine).all() or np.linalg.matrix_rank(affine[:3, :3]) < 3:
        sides = ", ".join(map(str, affine[:3, :3].tolist()))
        raise ValueError(f"the axes of its affine are {sides}; write their real directions there")
    turn = orientations.ornt_transform(
        orientations.io_orientation(affine), orientations.axcodes2ornt(PLANES[plane])
    )
    shape = tuple(volume.shape[axis] for axis in np.argsort(turn[:, 0]))
    return Grid(shape, affine @ orientations.inv_ornt_aff(turn, volume.shape), turn)


def _form_of(pair: Pair, slices: Slices) -> _Form:
    """Reads the headers of a volume and its mask.

    A mask that has the place of its image is turned by its own header. Another one, such as one
    that was saved without the image's affine, is turned like the image.

    Raises:
      ValueError: they do not suit each other.
    """
    with corruption_named(pair.image):
        image = open_volume(pair.image)
        grid, crop = grid_of(image, slices.plane), slices.crop
        if crop > min(grid.shape[:2]):
            raise ValueError(f"its slices of {grid.shape[:2]} pixels are below the crop's {crop}")
    with corruption_named(pair.mask):
        mask = open_volume(pair.mask)
        mask_grid = grid_of(mask, slices.plane)
        aligned = _same_place(grid, mask_grid)
        if not aligned and mask.shape != image.shape:
            raise ValueError(f"its shape is {mask.shape}, that of its image is {image.shape}")
    # Stretching changes the side of a pixel, which the distances between surfaces need.
    across, down = (
        float(side) * (crop or count) / slices.image_size
        for side, count in zip(grid.sides[:2], grid.shape[:2], strict=True)
    )
    # A mask without its image's affine has the order of its voxels, not its own axes.
    turn = mask_grid.turn if aligned else grid.turn
    return _Form(grid, turn, aligned, (float(grid.sides[2]), down, across))


def _same_place(grid: Grid, mask_grid: Grid) -> bool:
    """Returns whether the corners of two grids are at the same places, and have equal indices."""
    if grid.shape != mask_grid.shape:
        return False
    # Two affine maps that agree at the corners agree at every voxel between them.
    ends = np.array(grid.shape)[:, None] - 1
    corners = np.vstack([ends * np.indices((2, 2, 2)).reshape(3, 8), np.ones(8)])
    shift = np.linalg.solve(grid.affine, mask_grid.affine @ corners) - corners
    return bool((np.abs(shift) < _SHIFT).all())


def _about_planes(pairs: Sequence[Pair], forms: Sequence[_Form], plane: str) -> list[str]:
    """Returns a note about volumes whose voxels are far thicker along another axis than slices."""
    thick: dict[str, list[str]] = {}
    for pair, form in zip(pairs, forms, strict=True):
        sides = form.grid.sides
        axis = int(sides.argmax())
        if sides[axis] > 2 * sides[2]:
            direction = PLANES[plane][axis]
            name = next(name for name, axes in PLANES.items() if axes[2] == direction)
            thick.setdefault(name, []).append(pair.name)
    return [
        f"{len(names)} scans have their thickest voxels across {name} slices, but {plane} ones are "
        f"used: {first_few(names, 3)}; data.plane={name} uses those"
        for name, names in thick.items()
    ]


def _chosen(masks: np.ndarray, slices: Slices) -> np.ndarray:
    """Returns which slices of a volume's masks u8[D, S, S] are kept, i64[n]."""
    keep = np.ones(len(masks), bool)
    if slices.labelled:
        # The ends of a volume are left out too, as HarmoFL's code does.
        keep = ((masks > 0) & (masks != UNLABELLED)).any((1, 2))
        keep[[0, -1]] = False
    return np.flatnonzero(keep)


def _values_of(masks: Sequence[Path], root: Path, slices: Slices) -> np.ndarray:
    """Returns which values the masks have, bool[N, 256], kept in the cache."""

    def look(file: Path) -> np.ndarray:
        with corruption_named(file):
            seen = np.bincount(_mask_of(file).ravel(), minlength=256) > 0
        return np.packbits(seen).view("<i4")

    name = f"looking at masks-{root.resolve().name}-{hash_of_files(masks, root, _FORM)}"
    rows = cached_numbers(slices.cache, name, masks, look, 8, slices.progress)
    return np.unpackbits(rows.view(np.uint8), axis=1).astype(bool)


def _slices_of(
    pairs: Sequence[Pair],
    forms: Sequence[_Form],
    ends: np.ndarray,
    root: Path,
    slices: Slices,
    table: np.ndarray,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns u8[D, 2, size, size], the intensities and classes of all slices, cached, and notes.

    The slices of pair k are `ends[k]` to `ends[k + 1]`; `table` u8[256] has the class of a value.
    """
    size, window = slices.image_size, slices.window

    def make(write: Write) -> tuple[str, ...]:
        def convert(k: int) -> bool:
            with corruption_named(pairs[k].image):
                volume = voxels_of(pairs[k].image, forms[k].grid.turn)
            grey = to_bytes(volume, window)
            with corruption_named(pairs[k].mask):
                mask = table[turned(_mask_of(pairs[k].mask), forms[k].mask_turn)]
            squares = [squared(*pair, slices) for pair in zip(grey, mask, strict=True)]
            write(np.stack(squares), int(ends[k]))
            return not window and _is_padded(volume, grey)

        numbers = range(len(pairs))
        are_padded = in_threads(convert, numbers, "volumes", slices.progress, _THREADS)
        padded = [pair.name for pair, is_padded in zip(pairs, are_padded, strict=True) if is_padded]
        if not padded:
            return ()
        return (
            f"{len(padded)} scans have intensities far below all others, such as padding, which "
            f"take most of the 256 greys: {first_few(padded, 3)}; data.window=LOW,HIGH, such as "
            "-160,240 for soft tissue in CT, gives the greys to that range",
        )

    files = [file for pair in pairs for file in pair[:2]]
    form = f"{_FORM}-{size}-{slices.crop}-{slices.plane}-{window}-{table.tobytes().hex()}"
    name = f"{root.resolve().name}-slices-{form}-{hash_of_files(files, root, size)}"
    return cached_array(slices.cache, name, (int(ends[-1]), 2, size, size), make)


def turned(array: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Returns the array [X, Y, Z] of a file as slices [D, H, W], see `Grid.turn`."""
    from nibabel.orientations import apply_orientation

    return apply_orientation(array, turn).T


def turned_back(slices: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Returns slices [D, H, W] as the array [X, Y, Z] of a file, the inverse of `turned`."""
    from nibabel.orientations import apply_orientation, axcodes2ornt, ornt_transform

    return apply_orientation(slices.T, ornt_transform(axcodes2ornt("RAS"), turn))


def voxels_of(path: Path, turn: np.ndarray) -> np.ndarray:
    """Returns the numbers f64[D, H, W] of a volume, scaled by its header."""
    voxels = _read(path, np.float64)
    if not np.isfinite(voxels).all():
        raise ValueError("it has voxels that are not finite; replace them")
    return turned(voxels, turn)


def _mask_of(path: Path) -> np.ndarray:
    """Returns the values u8[X, Y, Z] of a mask."""
    voxels = _read(path)
    with np.errstate(invalid="ignore"):  # for NaN
        mask = np.clip(np.rint(voxels), 0, 255).astype(np.uint8)
        changed = ~(np.abs(voxels - mask.astype(float)) <= _ROUNDING)
    if changed.any():
        raise ValueError(
            f"it has the value {voxels[changed][0]:g}; labels are whole numbers 0 to 255, to a "
            "thousandth: resample masks to the nearest value"
        )
    return mask


def _read(path: Path, dtype: Any = None) -> np.ndarray:
    """Returns the numbers [X, Y, Z] of a file, scaled by its header."""
    from nibabel.fileholders import FileHolder

    with gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb") as stream:
        image = FileHolder(fileobj=stream)
        volume = type(open_volume(path)).from_file_map({"image": image}, mmap=False)
        voxels = np.asarray(volume.dataobj, dtype)
        while stream.read(2**20):  # to the end of a packed file, where it has its checksum
            pass
    return voxels


def to_bytes(volume: np.ndarray, window: Sequence[float] = ()) -> np.ndarray:
    """Returns intensities f64[...] clipped to `window` and stretched to bytes, rounded down.

    Without a window it is [smallest, 99 % quantile]. If 99 % have the smallest one, the greatest
    takes the quantile's place; a volume of one intensity becomes 0.
    """
    # The quantile, because a few bright voxels (metal, vessels) would darken all else.
    low, high = window or (volume.min(), np.quantile(volume, _QUANTILE))
    if high == low and (high := volume.max()) == low:
        return np.zeros(volume.shape, np.uint8)
    return (255 * ((np.clip(volume, low, high) - low) / (high - low))).astype(np.uint8)


def _is_padded(volume: np.ndarray, grey: np.ndarray) -> bool:
    """Returns whether 95 % of the intensities above the smallest share the upper half of bytes."""
    upper = grey >= 128
    crowded = np.count_nonzero(upper) > 0.95 * np.count_nonzero(grey)
    return bool(crowded and np.ptp(volume[upper]) > 0)  # else there are two intensities


def squared(grey: np.ndarray, mask: np.ndarray, slices: Slices) -> np.ndarray:
    """Returns u8[2, size, size] of a slice u8[H, W] and its mask."""
    from PIL import Image

    size, crop = (slices.image_size,) * 2, slices.crop
    if crop:
        top, left = ((side - crop) // 2 for side in grey.shape)
        middle = slice(top, top + crop), slice(left, left + crop)
        grey, mask = grey[middle], mask[middle]
    image = Image.fromarray(grey).resize(size, Image.Resampling.BILINEAR)
    classes = Image.fromarray(mask).resize(size, Image.Resampling.NEAREST)
    return np.stack([np.asarray(image), np.asarray(classes)])
