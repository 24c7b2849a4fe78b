"""Makes the 19 corruptions of CIFAR-10-C at its five severities.

`corrupt` makes the images of the published files, except for the random draws. Strengths are for
images of 32x32. The package imagecorruptions-imaug cannot make them: its strengths are for
ImageNet-C's images of 224x224 (its noise at severity 1 equals CIFAR-10-C's at 3 to 5), and it draws
from NumPy's global generator. The photographs of frost come from this package (the extra
"corruptions"), and tests compare with it at its strengths.

Reference: Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019, and the authors' program for CIFAR-10-C.
"""

from collections.abc import Collection

import numpy as np

from fedjax_bn.data.corruptions.camera import CAMERA
from fedjax_bn.data.corruptions.weather import WEATHER
from fedjax_bn.data.seeds import generator

# The four types that are left out in turn, as TsmoBN's and UniFed's tables head them: brightness is
# "digital", so that 10 to 12 clients train.
TYPES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog"),
    "digital": ("brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
INTERNAL = tuple(name for names in TYPES.values() for name in names)
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SEVERITIES = (1, 2, 3, 4, 5)
# A corruption's generator depends on its place here, so the order must not change.
CORRUPTIONS = {name: (CAMERA | WEATHER)[name] for name in INTERNAL + EXTRA}
CHUNK = 1000  # images that share one generator; another number gives other draws


def groups_of(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns the four types and "extra", each with its corruptions that are in `names`."""
    groups = {**TYPES, "extra": EXTRA}
    there = {kind: tuple(one for one in own if one in names) for kind, own in groups.items()}
    return {kind: own for kind, own in there.items() if own}


def corrupt(
    images: np.ndarray, name: str, severity: int, seed: int = 0, chunk: int = 0
) -> np.ndarray:
    """Returns the images corrupted, each with its own draws.

    Args:
      images: u8[N, 32, 32, 3].
      name: one of `CORRUPTIONS`.
      severity: 1 to 5.
      seed: at least 0. The same seed gives the same pixels; corruptions and severities draw
        independently.
      chunk: at least 0; which thousand of a dataset's images these are. Each has its generator.

    Returns:
      u8[N, 32, 32, 3], values truncated, not rounded, as in the published files.

    Raises:
      ValueError: the name or the severity is unknown.
      ModuleNotFoundError: frost or spatter, without the extra package.
    """
    if name not in CORRUPTIONS:
        raise ValueError(f"corruption {name!r} is unknown; choose from {', '.join(CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity is {severity}; it must be one of {SEVERITIES}")
    change, strengths = CORRUPTIONS[name]
    rng = generator(seed, 3, list(CORRUPTIONS).index(name), severity, chunk)
    values = np.clip(change(images / 255, rng, *strengths[severity - 1]), 0, 1)
    return (values * 255 + 1e-6).astype(np.uint8)  # 1e-6, so that k/255 stays k
