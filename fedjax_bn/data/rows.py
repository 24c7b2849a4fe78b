"""Chosen rows of an array that may be far larger than memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np


class Rows:
    """Read-only rows `array[index]`, gathered when they are read.

    `rows[i]`, `rows[a:b]`, `rows[i64 array]` and `rows[bool array]` are what `array[index]` would
    give there, as new NumPy arrays; so are `len`, `shape`, `dtype`, `ndim`, `nbytes`, iteration and
    `np.asarray`. Other axes are indexed afterwards: `rows[3:5][:, 0]`.

    Args:
      array: [N, ...], in memory or memory-mapped; it is kept, not copied, and never written to.
      index: i64[n] in [0, N), which rows and in what order; repeats are allowed.

    Raises:
      IndexError: the index has a number outside [0, N).
    """

    __slots__ = ("array", "index")

    def __init__(self, array: "np.ndarray | Rows", index: np.ndarray):
        # Checked here, since rows are read much later, and NumPy takes negative numbers.
        wrong = index[(index < 0) | (index >= len(array))]
        if wrong.size:
            raise IndexError(f"there is no row {wrong[0]}; rows are 0..{len(array) - 1}")
        index = np.array(index, np.int64)
        if isinstance(array, Rows):
            array, index = array.array, array.index[index]
        self.array, self.index = array, index
        index.setflags(write=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, ...)."""
        return (len(self.index), *self.array.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.array.ndim

    @property
    def nbytes(self) -> int:
        """Bytes that the chosen rows would take."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        """Returns n."""
        return len(self.index)

    def __getitem__(self, item: Any) -> np.ndarray:
        """Returns `array[index][item]` for a number, slice or array of numbers or bools."""
        if isinstance(item, tuple) or item is None or item is Ellipsis:
            raise TypeError(f"rows[{item}]: index rows alone, then the array that this gives")
        chosen = self.index[item]
        if not np.ndim(chosen):
            return np.array(self.array[chosen])
        if not isinstance(self.array, np.memmap):
            return self.array[chosen]
        # Read from the first byte to the last, as disks like it, without a second copy.
        plain, flat = self.array.view(np.ndarray), chosen.ravel()
        gathered = np.empty((len(flat), *self.shape[1:]), self.dtype)
        for place in np.argsort(flat, kind="stable"):
            gathered[place] = plain[flat[place]]
        return gathered.reshape(*chosen.shape, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns all rows, for `np.asarray`."""
        if copy is False:
            raise ValueError("the rows must be gathered, which copies them: leave copy at None")
        return self[:].astype(dtype or self.dtype, copy=False)


def blocks(array: np.ndarray | Rows, size: int = 1024) -> Iterator[np.ndarray]:
    """Yields the rows of an array in order, at most `size` of them in memory at a time."""
    return (array[start : start + size] for start in range(0, len(array), size))
