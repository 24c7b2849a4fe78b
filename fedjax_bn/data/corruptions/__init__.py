"""The 19 corruptions of CIFAR-10-C, at its own five severities.

`corrupt` makes what the published files hold, but for the random draws. Their strengths are for
images of 32x32. The maintained package, imagecorruptions-imaug, has the same 19 functions, but
their strengths, which no argument changes, are ImageNet-C's, for images of 224x224, and they draw
from NumPy's global generator: its noise at severity 1 is that of CIFAR-10-C at 3 to 5, and its
defocus, glass and motion blur are stronger than at 5. The photographs of frost are read from it
(the extra "corruptions"), and tests compare with it at its own strengths.

Reference: Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019, and the authors' program for CIFAR-10-C.
"""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from fedjax_bn.data.corruptions import camera, weather
from fedjax_bn.data.seeds import generator

# the four types that are left out in turn, as TsmoBN's and UniFed's tables head them (brightness is
# "digital", so that 10 to 12 clients train), and the corruptions kept for the end
TYPES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog"),
    "digital": ("brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
INTERNAL = tuple(name for names in TYPES.values() for name in names)
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SEVERITIES = (1, 2, 3, 4, 5)


def _singles(*values: Any) -> tuple[tuple[Any], ...]:
    return tuple((value,) for value in values)


# each with its arguments at severity 1 to 5
CORRUPTIONS: dict[str, tuple[Callable[..., np.ndarray], tuple[tuple[Any, ...], ...]]] = {
    "gaussian_noise": (camera.gaussian_noise, _singles(0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (camera.shot_noise, _singles(500, 250, 100, 75, 50)),
    "impulse_noise": (camera.impulse_noise, _singles(0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": (
        camera.defocus_blur,
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    ),
    "glass_blur": (
        camera.glass_blur,
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    ),
    "motion_blur": (camera.motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": (
        camera.zoom_blur,
        _singles(*(np.arange(1, end, 0.01) for end in (1.06, 1.11, 1.16, 1.21, 1.26))),
    ),
    "snow": (
        weather.snow,
        (
            ((0.1, 0.2), 1, 0.6, (8, 3), 0.95),
            ((0.1, 0.2), 1, 0.5, (10, 4), 0.9),
            ((0.15, 0.3), 1.75, 0.55, (10, 4), 0.9),
            ((0.25, 0.3), 2.25, 0.6, (12, 6), 0.85),
            ((0.3, 0.3), 1.25, 0.65, (14, 12), 0.8),
        ),
    ),
    "frost": (weather.frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": (weather.fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (camera.brightness, _singles(0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (camera.contrast, _singles(0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": (
        camera.elastic_transform,
        ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
    ),
    "pixelate": (camera.pixelate, _singles(0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": (camera.jpeg_compression, _singles(80, 65, 58, 50, 40)),
    "speckle_noise": (camera.speckle_noise, _singles(0.06, 0.1, 0.12, 0.16, 0.2)),
    "gaussian_blur": (camera.gaussian_blur, _singles(0.4, 0.6, 0.7, 0.8, 1)),
    "spatter": (
        weather.spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, False),
            (0.65, 0.1, 0.8, 0.7, 0.5, False),
            (0.65, 0.3, 1, 0.69, 0.5, False),
            (0.65, 0.1, 0.7, 0.69, 0.6, True),
            (0.65, 0.1, 0.5, 0.68, 0.6, True),
        ),
    ),
    "saturate": (camera.saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
}
CHUNK = 1000  # images that are corrupted together: what the draws of the next ones depend on


def groups_of(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns the four types and "extra", each with its corruptions that are in `names`."""
    groups = {**TYPES, "extra": EXTRA}
    there = {kind: tuple(one for one in own if one in names) for kind, own in groups.items()}
    return {kind: own for kind, own in there.items() if own}


def corrupt(
    images: np.ndarray, name: str, severity: int, seed: int = 0, chunk: int = 0
) -> np.ndarray:
    """Corrupts every image for itself.

    Args:
      images: u8[N, 32, 32, 3].
      name: one of `CORRUPTIONS`.
      severity: 1 to 5.
      seed: at least 0. The same seed gives the same pixels; other corruptions and severities draw
        independently of each other.
      chunk: at least 0; which thousand of a dataset's images this is. Each draws for itself.

    Returns:
      u8[N, 32, 32, 3], values cut off, not rounded, as in the published files.

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
    return _to_bytes(change(images / 255, rng, *strengths[severity - 1]))


def _to_bytes(images: np.ndarray) -> np.ndarray:
    """Returns values, cut to [0, 1], as u8; a hair is added so that k/255 stays k."""
    return (np.clip(images, 0, 1) * 255 + 1e-6).astype(np.uint8)
