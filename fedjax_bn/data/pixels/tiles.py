"""Cuts large images into square tiles at their own resolution, and puts tiles together again."""

from collections.abc import Sequence

import numpy as np


def number_of_tiles(height: int, width: int, size: int) -> int:
    """Returns how many tiles `cut` makes of an image."""
    return -(-height // size) * -(-width // size)


def cut(image: np.ndarray, size: int, fill: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns an image's square tiles, row by row, and their places.

    The tiles follow each other without a gap; the last of a row or column is shifted so that it
    ends with the image, and shows some pixels again. An image smaller than a tile is padded at its
    right and lower edge.

    Args:
      image: [H, W, ...], such as an image, a mask or logits.
      size: pixels a side of a tile, at least 1.
      fill: the value of padding and of pixels that an earlier tile shows, such as
        `engine.inputs.UNLABELLED` for a mask; None to repeat the edge and to show pixels again.

    Returns:
      [n, size, size, ...] and i64[n, 2], the row and column of each tile's first pixel.
    """
    height, width = image.shape[:2]
    no_padding = ((0, 0),) * (image.ndim - 2)
    around = ((0, max(size - height, 0)), (0, max(size - width, 0)), *no_padding)
    padding = {"mode": "edge"} if fill is None else {"constant_values": fill}
    image = np.pad(image, around, **padding)
    rows, columns = (  # the last one is shifted inside
        [min(start, max(side - size, 0)) for start in range(0, side, size)]
        for side in (height, width)
    )
    places = [(row, column) for row in rows for column in columns]
    tiles = np.stack([image[y : y + size, x : x + size] for y, x in places])
    if fill is not None:
        # Tiles overlap at the last row and column; each pixel counts in its first tile alone.
        shown = np.zeros(image.shape[:2], bool)
        for tile, (y, x) in zip(tiles, places, strict=True):
            again = shown[y : y + size, x : x + size]
            tile[again] = fill
            again[:] = True
    return tiles, np.array(places, np.int64)


def put_together(tiles: np.ndarray, places: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the image of a shape (H, W) whose tiles `cut` made; a pixel is its first tile's.

    Args:
      tiles: [n, size, size, ...], what became of the tiles, such as predictions.
      places: i64[n, 2], as `cut` returns them.
      shape: height and width of the image.

    Returns:
      [H, W, ...]; without `fill` and with it equal to the image that was cut.
    """
    height, width = shape
    image = np.empty((height, width, *tiles.shape[3:]), tiles.dtype)
    # Backwards, so that the first tile of a pixel is written last.
    for tile, (y, x) in zip(tiles[::-1], places[::-1].tolist(), strict=True):
        region = image[y : y + tile.shape[0], x : x + tile.shape[1]]  # ends where the image does
        region[:] = tile[: region.shape[0], : region.shape[1]]
    return image
