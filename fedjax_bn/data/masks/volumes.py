"""Makes slices of scans in NIfTI, each a volume with a mask of its shape, and their labels.

An array [X, Y, Z] of NIfTI gives Z slices of Y rows and X columns, in the order of the file, as
SimpleITK reads them. Intensities are clipped to the smallest one and the 99 % quantile of the whole
volume and stretched to bytes, which are rounded down (HarmoFL's code, Jiang et al. 2022). Slices
are cut to a square in their middle if `crop` is set, and stretched to squares: images bilinear,
masks to the nearest value.

The three channels of an image are a slice between its two neighbours, the first and the last slice
being their own neighbours, or three times the slice.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.label_trees import MASK, SPACING, VOLUME
from fedjax_bn.data.masks.assemble import Pair
from fedjax_bn.data.masks.values import classes_of
from fedjax_bn.data.messages import first_few, progress_bar
from fedjax_bn.data.pixels.cache import Write, cached_array, cached_numbers
from fedjax_bn.data.pixels.decode import hash_of_files, relative_names
from fedjax_bn.data.regular_files import open_regular
from fedjax_bn.data.sets.arrays import check_memory
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.source import Pool, Source, check_source
from fedjax_bn.engine.inputs import UNLABELLED

SUFFIXES = (".nii", ".nii.gz")
CHANNELS = NEIGHBOURS, REPEATED = "neighbours", "repeated"
_LARGEST = 2**33  # bytes of a file
_QUANTILE = 0.99
_THREADS = 4  # each of which has a volume of f64
_FORM = 2  # raise it when the same files would give other slices


class Slices(NamedTuple):
    """The conversion of volumes into square slices.

    Attributes:
      image_size: pixels a side.
      channels: "neighbours" or "repeated", see above.
      labelled: whether slices whose mask is background alone are left out, as are the first and the
        last of a volume.
      crop: pixels a side of the square that is cut out of a slice's middle; 0 for the whole slice.
      cache, progress: see `pixels.decode`.
    """

    image_size: int
    channels: str = NEIGHBOURS
    labelled: bool = False
    crop: int = 0
    cache: str | Path | None = None
    progress: bool = True


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

    Labels are masks u8[N, size, size], `volume` i32[N], and `spacing` f32[N, 3] by the header, of
    the slices as they are stored. Images reach a model as u8/255.

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
    pairs = [pair for owned in domains.values() for pair in owned]
    depths, spacing, aligned = zip(*(_form_of(pair, slices) for pair in pairs), strict=True)
    owners = [domain for domain, owned in domains.items() for _ in owned]
    files, masks = [file for pair in pairs for file in pair[:2]], [pair.mask for pair in pairs]
    present = _values_of(masks, root, slices)
    classes, table, about_values = classes_of(
        present, owners, relative_names(masks, root), classes, values
    )
    ends = np.cumsum([0, *depths])
    pixels = _slices_of(pairs, ends, root, slices, table)
    names = np.array([pair.name for pair in pairs])
    pools, first, kept = [], 0, 0
    for domain, owned in domains.items():
        numbers = range(first, first := first + len(owned))
        rows = [ends[k] + _chosen(pixels[ends[k] : ends[k + 1], 1], slices) for k in numbers]
        volume = np.repeat(np.array(numbers, np.int32), list(map(len, rows)))
        if not len(volume):
            raise ValueError(
                f"{root}: no slice of {domain!r} is left, between its volumes' first and last and "
                "with a label: see its masks"
            )
        index, low, high = np.concatenate(rows), ends[volume], ends[volume + 1] - 1
        steps = (-1, 0, 1) if slices.channels == NEIGHBOURS else (0, 0, 0)
        images = [pixels[np.clip(index + step, low, high), 0] for step in steps]
        labels = {
            MASK: pixels[index, 1],
            VOLUME: volume,
            SPACING: np.array(spacing, np.float32)[volume],
        }
        parts = [pairs[k].part for k in volume]
        divided = None if None in parts else np.array(parts, np.int8)
        pools.append(Pool(domain, np.stack(images, -1), labels, names[volume], divided))
        kept += len(index)
    sizes = ", ".join(f"{domain} {len(owned)}" for domain, owned in domains.items())
    left = len(pixels) - kept
    about = [f"{len(pairs)} scans ({sizes}) with {len(pixels)} slices, of which {left} left out"]
    if other := [str(mask) for mask, same in zip(masks, aligned, strict=True) if not same]:
        about.append(
            f"masks with another place in space than their image: {first_few(other, 3)}; voxels "
            "belong together by their order in the file"
        )
    about_slices = repr(slices[: slices._fields.index("cache")])
    key = f"{about_slices} {hash_of_files(files, root, 0)}"
    notes, usual = (*notes, *about, about_values), ((0.0,) * 3, (1.0,) * 3)
    return check_source(Source(name, classes, tuple(pools), *usual, notes=notes, key=key))


def open_volume(path: Path) -> Any:
    """Returns a volume of nibabel, of which only the header is read yet."""
    try:
        import nibabel
    except ImportError as error:
        raise ImportError(
            f"{path} is a NIfTI volume, which needs nibabel, which is not installed: "
            "pip install 'fedjax_bn[nifti]'"
        ) from error
    open_regular(path, _LARGEST).close()
    volume = nibabel.load(path)
    if len(volume.shape) != 3 or min(volume.shape) < 1:
        raise ValueError(f"it has the shape {volume.shape}, not three axes: save one volume of it")
    check_memory(8 * int(np.prod(volume.shape)))  # masks are packed too well for a limit by ratio
    return volume


def _form_of(pair: Pair, slices: Slices) -> tuple[int, tuple[float, ...], bool]:
    """Reads the headers of a volume and its mask.

    Returns:
      The number of slices; millimetres between slices, rows and columns as they are stored, that
      is, stretched; and whether both have the same place in space, to a thousandth.

    Raises:
      ValueError: they do not suit each other.
    """
    with corruption_named(pair.image):
        image = open_volume(pair.image)
        sides, crop = image.header.get_zooms(), slices.crop
        if not (np.isfinite(sides).all() and min(sides) > 0):
            raise ValueError(f"its header has voxels of {sides} mm; write their real sides there")
        if crop > min(image.shape[:2]):
            raise ValueError(f"its slices of {image.shape[:2]} pixels are below the crop's {crop}")
    with corruption_named(pair.mask):
        mask = open_volume(pair.mask)
        if mask.shape != image.shape:
            raise ValueError(f"its shape is {mask.shape}, that of its image is {image.shape}")
    shown = zip(sides[:2], image.shape[:2], strict=True)
    across, down = (float(side) * (crop or count) / slices.image_size for side, count in shown)
    aligned = np.allclose(image.affine, mask.affine, rtol=1e-3, atol=1e-3)
    return image.shape[2], (float(sides[2]), down, across), aligned


def _chosen(masks: np.ndarray, slices: Slices) -> np.ndarray:
    """Returns which slices of a volume's masks u8[D, S, S] are kept, i64[n]."""
    keep = np.ones(len(masks), bool)
    if slices.labelled:
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
    pairs: Sequence[Pair], ends: np.ndarray, root: Path, slices: Slices, table: np.ndarray
) -> np.ndarray:
    """Returns u8[D, 2, size, size], the intensities and classes of all slices, cached.

    The slices of pair k are `ends[k]` to `ends[k + 1]`; `table` u8[256] has the class of a value.
    """
    size = slices.image_size

    def make(write: Write) -> tuple[str, ...]:
        def one(k: int) -> None:
            with corruption_named(pairs[k].image):
                grey = to_bytes(voxels_of(pairs[k].image))
            with corruption_named(pairs[k].mask):
                mask = table[_mask_of(pairs[k].mask)]
            both = [squared(*pair, slices) for pair in zip(grey, mask, strict=True)]
            write(np.stack(both), int(ends[k]))

        with (
            ThreadPoolExecutor(_THREADS) as threads,
            progress_bar(len(pairs), "volumes", slices.progress) as bar,
        ):
            for _ in threads.map(one, range(len(pairs))):
                bar.update(1)
        return ()

    files = [file for pair in pairs for file in pair[:2]]
    form = f"{_FORM}-{size}-{slices.crop}-{table.tobytes().hex()}"
    name = f"{root.resolve().name}-slices-{form}-{hash_of_files(files, root, size)}"
    return cached_array(slices.cache, name, (int(ends[-1]), 2, size, size), make)[0]


def voxels_of(path: Path) -> np.ndarray:
    """Returns the numbers f64[D, H, W] of a volume, scaled by its header."""
    voxels = np.asarray(open_volume(path).dataobj, np.float64).T
    if not np.isfinite(voxels).all():
        raise ValueError("it has voxels that are not finite: replace them")
    return voxels


def _mask_of(path: Path) -> np.ndarray:
    """Returns the values u8[D, H, W] of a mask."""
    voxels = np.asarray(open_volume(path).dataobj).T
    with np.errstate(invalid="ignore"):  # for NaN
        mask = np.clip(voxels, 0, 255).astype(np.uint8)
    if len(wrong := voxels[mask != voxels]):
        raise ValueError(f"it has the value {wrong[0]:g}; masks have whole numbers 0 to 255")
    return mask


def to_bytes(volume: np.ndarray) -> np.ndarray:
    """Returns intensities f64[...] clipped to [smallest, 99 % quantile] and stretched to bytes.

    They are rounded down. If 99 % have the smallest one, the greatest takes the quantile's place; a
    volume of one intensity becomes 0.
    """
    low, high = volume.min(), np.quantile(volume, _QUANTILE)
    if high == low and (high := volume.max()) == low:
        return np.zeros(volume.shape, np.uint8)
    return (255 * ((np.minimum(volume, high) - low) / (high - low))).astype(np.uint8)


def squared(grey: np.ndarray, mask: np.ndarray, slices: Slices) -> np.ndarray:
    """Returns u8[2, size, size] of a slice u8[H, W] and its mask."""
    from PIL import Image

    size, crop = slices.image_size, slices.crop
    if crop:
        top, left = ((side - crop) // 2 for side in grey.shape)
        grey, mask = (one[top : top + crop, left : left + crop] for one in (grey, mask))
    pair = ((grey, Image.Resampling.BILINEAR), (mask, Image.Resampling.NEAREST))
    return np.stack([Image.fromarray(one).resize((size, size), how) for one, how in pair])
