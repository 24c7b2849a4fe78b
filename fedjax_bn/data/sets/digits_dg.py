"""Digits-DG (Zhou et al. 2020): handwritten, coloured, photographed and printed digits.

    mnist/train/0/*.jpg  mnist/val/0/*.jpg  mnist_m/...  svhn/...  syn/...

Every domain has 600 images of 32x32 pixels a class, 480 in train and 120 in val, which become
training and validation parts.

TsmoBN (section 4.1, E.1) has 28x28 images and tests each domain as the unseen client of the other
three, one client each. It does not say how it normalizes; its network is FedBN's, and so is the
(0.5, 0.5) here.

References: Zhou, Yang, Hospedales, Xiang, "Deep domain-adversarial image generation for domain
generalisation", AAAI 2020; Jiang et al., "TsmoBN: interventional generalization for unseen clients
in federated learning", 2021.
"""

from pathlib import Path

from fedjax_bn.data.sets.folders import load_folders
from fedjax_bn.data.sets.published import Published, spelled
from fedjax_bn.data.source import TRAIN, VALIDATION, Source

DIGITS_DG = Published(
    name="digits_dg",
    domains={
        "mnist": (),
        "mnist_m": (),
        "svhn": (),
        "syn": ("synth", "syndigits", "synth_digits"),
    },
    classes=spelled(*map(str, range(10))),
    counts={"mnist": 6000, "mnist_m": 6000, "svhn": 6000, "syn": 6000},
    where=(
        "it must hold mnist, mnist_m, svhn and syn, each with train and val of class folders 0 to "
        "9 of images (Digits-DG, linked from DATASETS.md of github.com/KaiyangZhou/Dassl.pytorch)"
    ),
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
PARTS = {"train": TRAIN, "val": VALIDATION}


def load(
    path: str | Path | None,
    *,
    image_size: int = 28,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Source:
    """Digits-DG as u8[N, image_size, image_size, 3], ten classes, four domains.

    Args:
      path: the folder described above.
      image_size: pixels a side; TsmoBN has 28, the images 32.
      cache: folder for the decoded images, see `decode`.
      progress: show a bar while decoding.

    Returns:
      Source "digits_dg" with training and validation parts.

    Raises:
      FileNotFoundError: a domain's folder is missing.
      ValueError: a class has no images, or an image cannot be read.
      OSError: the cache cannot be written.
    """
    return load_folders(DIGITS_DG, path, image_size, cache=cache, progress=progress, parts=PARTS)
