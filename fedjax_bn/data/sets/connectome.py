"""Time series of brain regions as connectomes: correlations of all pairs of regions in a window."""

import numpy as np

_LIMIT = 1 - 1e-6  # of |correlation| before Fisher's z, which is infinite at 1
_BLOCK = 32


def window_starts(frames: int, window: int, stride: int = 1, most: int = 0) -> np.ndarray:
    """The first frame of each sliding window that fits into a series.

    Args:
      frames: length of the series.
      window: frames of a window, at most `frames`; 0 for the whole series as one.
      stride: frames from one window to the next, at least 1.
      most: if above 0, at most so many of these windows, evenly spaced from first to last.

    Returns:
      i64[W], ascending; W = (frames - window) // stride + 1 if not limited.
    """
    if not window:
        return np.zeros(1, np.int64)
    starts = np.arange(0, frames - window + 1, stride, dtype=np.int64)
    if 0 < most < len(starts):
        # Integers only, so that any machine picks the same windows.
        steps = max(most - 1, 1)
        starts = starts[np.arange(most) * (len(starts) - 1) // steps]
    return starts


def num_pairs(regions: int) -> int:
    """Length of a connectome vector, R (R - 1) / 2."""
    return regions * (regions - 1) // 2


def connectomes(
    series: np.ndarray, starts: np.ndarray, window: int, fisher_z: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The correlations of all pairs of regions in each window; a flat region has none.

    corr(a, b) = sum_t (a_t - mean a) (b_t - mean b) / (|a - mean a| |b - mean b|), and 0 where a or
    b does not vary within the window. Pairs are those above the diagonal, row by row: (0, 1),
    (0, 2), ..., (R - 2, R - 1).

    Args:
      series: f64[T, R].
      starts: i64[W], the windows' first frames.
      window: frames of a window; 0 for the whole series.
      fisher_z: replaces a correlation r by arctanh(r), with |r| cut to 1 - 1e-6.

    Returns:
      f32[W, R (R - 1) / 2], and which regions do not vary within a window, bool[W, R].
    """
    regions = series.shape[1]
    upper = np.flatnonzero(np.triu(np.ones((regions, regions), bool), 1))
    pairs = np.empty((len(starts), len(upper)), np.float32)
    flat = np.empty((len(starts), regions), bool)
    # A few windows at a time: their matrices stay in the processor's cache.
    for first in range(0, len(starts), _BLOCK):
        part = slice(first, first + _BLOCK)
        frames = starts[part, None] + np.arange(window or len(series))
        unit, flat[part] = _normalize(series[frames])
        unit = unit.astype(pairs.dtype)
        matrices = np.matmul(unit.transpose(0, 2, 1), unit).reshape(len(frames), -1)
        np.take(matrices, upper, axis=1, out=pairs[part], mode="clip")
    bound = np.float32(_LIMIT if fisher_z else 1)
    np.clip(pairs, -bound, bound, out=pairs)
    return (np.arctanh(pairs, out=pairs) if fisher_z else pairs), flat


def _normalize(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centred regions of norm 1 (0 where flat), f64[W, n, R], and which are flat, bool[W, R]."""
    flat = windows.max(1) == windows.min(1)
    centred = windows - windows.mean(1, keepdims=True)
    norms = np.sqrt((centred**2).sum(1))
    # Rounding of the mean leaves something of a flat region, which must not be normalized.
    norms[flat | (norms == 0)] = np.inf
    return centred / norms[:, None], flat
