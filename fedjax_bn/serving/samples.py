"""Images to predict: files, folders of them, or arrays, read when their turn comes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.decode import decode, relative_names
from fedjax_bn.data.pixels.raster import UPRIGHT
from fedjax_bn.data.pixels.resize import resized
from fedjax_bn.data.sets.arrays import names_in_npz, read_npz
from fedjax_bn.data.sets.folders import is_image

_IMAGES = "images"


class Samples(NamedTuple):
    """Samples of one client.

    Attributes:
      names: str[N], of the files, or the numbers of an archive's samples.
      read: `read(index i64[n]) -> images [n, ...]`.
    """

    names: Sequence[str]
    read: Callable[[np.ndarray], np.ndarray]


def open_samples(
    path: Path, shape: Sequence[int], resize: bool = False, orientation: str = UPRIGHT
) -> Samples:
    """The samples of a path: an image, a folder of images (and folders of them), or a `.npz`.

    Image files are stretched to the model's square, as the readers of image folders do it in
    training. Hidden files and folders are left out, as `evaluate` does it. An archive has one array
    `images`, or `NAME__images`.

    Args:
      path: what the user gave.
      shape: of one sample of the model.
      resize: whether an archive's bytes of another size are stretched too.
      orientation: of image files, "upright" or "stored", as the model was trained.

    Raises:
      ValueError: the archive has no such array, the model reads no images, or there are none.
      FileNotFoundError: there is nothing of that name.
    """
    if path.suffix == ".npz":
        return _of_archive(path, shape, resize)
    if not path.exists():
        raise FileNotFoundError(f"--data {path} is not there: give images, a folder, or a .npz")
    files = sorted(one for one in path.rglob("*") if one.is_file() and _is_shown(one, path))
    files = files if path.is_dir() else [path]
    if not files:
        raise ValueError(f"--data {path} holds no image file: give another folder, or a .npz")
    root = path if path.is_dir() else path.parent
    read = file_reader(shape, root, orientation)
    return Samples(relative_names(files, root), lambda index: read([files[i] for i in index]))


def file_reader(
    shape: Sequence[int], root: Path, orientation: str = UPRIGHT
) -> Callable[[Sequence[Path]], np.ndarray]:
    """Returns `read(files) -> u8[n, H, H, 3]`, as `decode` does it.

    Args:
      shape: of one sample of the model.
      root: names in errors count from here.
      orientation: as in `open_samples`.

    Raises:
      ValueError: the model does not read squares of RGB; at the call, a file cannot be read.
    """
    if len(shape) != 3 or shape[0] != shape[1] or shape[2] != 3:
        raise ValueError(
            f"the model reads samples of shape {list(shape)}, which image files do not give: give "
            "a .npz with an array images"
        )
    how = {"root": root, "progress": False, "orientation": orientation}
    return lambda files: decode(files, shape[0], **how)[0]


def _is_shown(file: Path, root: Path) -> bool:
    """Whether it is an image, and no folder on its way from the root is hidden."""
    folders = file.relative_to(root).parts[:-1]
    return is_image(file.name) and not any(name.startswith(".") for name in folders)


def _of_archive(path: Path, shape: Sequence[int], resize: bool) -> Samples:
    if not path.is_file():
        raise FileNotFoundError(f"--data {path} is no file: give images, a folder, or a .npz")
    names = names_in_npz(path)
    found = [name for name in names if name == _IMAGES or name.endswith(f"__{_IMAGES}")]
    if len(found) != 1:
        raise ValueError(
            f"{path} has the arrays {first_few(names) or 'none'}: give a .npz with one array "
            f"{_IMAGES} [N, ...], or NAME__{_IMAGES}"
        )
    images = read_npz(path, found)[found[0]]
    if resize:
        images = resized(images, shape)
    return Samples([str(i) for i in range(len(images))], images.__getitem__)
