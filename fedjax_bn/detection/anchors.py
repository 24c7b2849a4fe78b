"""Where a detector predicts: maps of cells, and in every cell boxes about anchors.

Anchors are the sizes from which a detector's boxes are scaled (Redmon & Farhadi 2018, YOLOv3).
"""

from typing import NamedTuple

Size = tuple[float, float]


class Anchors(NamedTuple):
    """The levels of a detector, from the finest map to the coarsest.

    Attributes:
      sizes: (width, height) in pixels of the A anchors of each level.
      strides: pixels a cell, of each level.
    """

    sizes: tuple[tuple[Size, ...], ...]
    strides: tuple[int, ...]

    @property
    def each(self) -> int:
        """A, anchors a cell."""
        return len(self.sizes[0])


def checked(anchors: Anchors) -> Anchors:
    """Returns the anchors if they make sense.

    Raises:
      ValueError: a level lacks its stride or its anchors, levels have different numbers of them, or
        a size or stride is not above 0.
    """
    sizes, strides = anchors
    if not sizes or len(sizes) != len(strides) or len({len(level) for level in sizes}) != 1:
        raise ValueError(
            f"anchors have {[len(level) for level in sizes]} sizes on their levels and "
            f"{len(strides)} strides: give each level one stride and all the same number of sizes"
        )
    numbers = [number for level in sizes for size in level for number in size]
    if not numbers or min(*numbers, *strides) <= 0:
        raise ValueError(f"anchors need sizes and strides above 0, not {sizes} and {strides}")
    return anchors
