"""What the readers of original datasets share: finding files, naming faults, resizing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.regular_files import Refused

SIZE = 28


class Original(NamedTuple):
    """One split of a dataset as its authors published it.

    labels: i32[N].
    read: indices i64[n] -> images u8[n, h, w] or u8[n, h, w, 3]; only what is asked for is read.
    published: how many samples, the first ones, are of the published training part; None for all.
    """

    labels: np.ndarray
    read: Callable[[np.ndarray], np.ndarray]
    published: int | None = None


def first_existing(folder: Path, names: Sequence[str], remedy: str) -> Path:
    """The first of `names` that exists in `folder`.

    Raises:
      FileNotFoundError: none does; the sentence ends with `remedy`.
    """
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(f"{folder / names[0]} is missing; {remedy}")


@contextmanager
def corruption_named(path: Path) -> Iterator[None]:
    """Turns whatever a format's parser raises on a bad file into a ValueError that names the file.

    Raises:
      ValueError: the body raised anything but a missing file or a missing package. A file that
        `regular_files` refuses is named already.
    """
    try:
        yield
    except (FileNotFoundError, ImportError, Refused):
        raise
    except MemoryError as error:
        raise ValueError(f"{path} takes more memory than there is; fetch it again") from error
    except Exception as error:  # parsers raise zlib.error, struct.error, TypeError, KeyError, ...
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {shorten(str(error), 200)}); fetch it "
            "again"
        ) from error


def to_digits(images: np.ndarray) -> np.ndarray:
    """u8[n, h, w] or u8[n, h, w, 3] as u8[n, 28, 28, 3].

    Other sizes are resized by Pillow's bilinear filter, which averages where it shrinks, as
    torchvision's Resize in FedBN's code does; grey becomes three equal channels.
    """
    from PIL import Image

    if images.shape[1:3] != (SIZE, SIZE):
        resized = [Image.fromarray(one).resize((SIZE, SIZE), Image.BILINEAR) for one in images]
        images = np.stack([np.asarray(one) for one in resized])
    if images.ndim == 3:
        images = np.repeat(images[..., None], 3, axis=-1)
    return np.ascontiguousarray(images)
