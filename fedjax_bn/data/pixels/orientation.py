"""EXIF's orientation: how a stored image is turned to stand upright, and boxes with it.

A camera stores the rows of its sensor and writes into EXIF how the picture was held; every viewer
turns it, `Image.open` and so torchvision's readers do not. The tag is one of eight: 1 as stored, 2
to 4 mirrored or upside down, 5 to 8 with width and height exchanged.
"""

from typing import Any

import numpy as np

UPRIGHT, STORED = "upright", "stored"
ORIENTATIONS = (UPRIGHT, STORED)
ORIENTATION = 274  # EXIF's number of the tag
_TURNS = {  # the tag -> how Pillow calls what makes the image upright
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_BACK = {6: 8, 8: 6}  # every other turn is its own inverse


def orientation_of(image: Any) -> int:
    """Returns the tag of an image of Pillow, 1 to 8; call it before the pixels are decoded.

    It is 1 where there is no tag, or EXIF is damaged: viewers show such an image as it is stored.
    """
    from PIL import Image

    try:
        # not PNG's own `getexif`, which decodes all pixels first
        tag = Image.Image.getexif(image).get(ORIENTATION, 1)
    except Exception:  # Pillow raises SyntaxError, struct.error, ... on damaged EXIF
        return 1
    return tag if isinstance(tag, int) and tag in _TURNS else 1


def turn(image: Any, tag: int) -> Any:
    """Returns a stored image of Pillow turned upright, for its tag 1 to 8."""
    from PIL import Image

    return image if tag == 1 else image.transpose(getattr(Image.Transpose, _TURNS[tag]))


def tag_of_other_frame(image: Any, orientation: str) -> tuple[int, int, int]:
    """Returns width and height of the image as it is used, and the tag that leads to it.

    Args:
      image: of Pillow, before its pixels are decoded.
      orientation: "upright" or "stored", how it is used.

    Returns:
      Width and height in pixels, and the tag by which boxes of the other frame are turned into this
      one: of the stored frame where the image is used upright, else of the upright one.
    """
    tag, (width, height) = orientation_of(image), image.size
    if turned_by_pillow(image):
        return width, height, tag
    if orientation == STORED:
        return width, height, _BACK.get(tag, tag)
    return (height, width, tag) if tag > 4 else (width, height, tag)


def turned_by_pillow(image: Any) -> bool:
    """Returns whether Pillow itself turns the image while it decodes, as it does for TIFF."""
    return image.format == "TIFF"


def turn_corners(corners: np.ndarray, tag: int) -> np.ndarray:
    """Returns boxes f64[n, 4], in shares of an image, turned with it; for tags 5 to 8."""
    top, left, bottom, right = corners.T  # rows become columns
    if tag in (6, 7):
        left, right = 1 - right, 1 - left
    if tag in (7, 8):
        top, bottom = 1 - bottom, 1 - top
    return np.stack([left, top, right, bottom], axis=1)


def orientation_notes(count: int, orientation: str) -> tuple[str, ...]:
    """Returns a sentence on how many images have a tag other than 1; none where none has."""
    if not count:
        return ()
    if orientation == STORED:
        return (f"images left as stored, against their EXIF orientation: {count}",)
    return (f"images turned upright by their EXIF orientation: {count}",)
