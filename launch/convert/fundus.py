"""Writes fundus images of optic discs and cups as folders that data.name=masks reads.

    python launch/convert/fundus.py ORIGINAL FOLDER

ORIGINAL holds Domain1 to Domain4 of DoFE (Wang et al., IEEE TMI 2020, linked from
github.com/emma-sjwang/Dofe; FedDG has the same sites), DOMAIN/{train,test}/ROIs/{image,mask}/NAME,
or the five centres of doi.org/10.5281/zenodo.8009107, CENTRE/{train,test}/{image,mask}/NAME. Images
are copied to FOLDER/DOMAIN/{train,test}/images. Their masks, white around a grey disc with a black
cup, become FOLDER/DOMAIN/{train,test}/masks, with 0 for the background, 1 for the disc and 2 for
the cup.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image

BACKGROUND, DISC, CUP = 0, 1, 2


def classes_of(grey: np.ndarray) -> np.ndarray:
    """Returns the classes u8[H, W] of a published mask u8[H, W]."""
    return np.select([grey > 128, grey > 0], [BACKGROUND, DISC], CUP).astype(np.uint8)


def convert(original: Path, folder: Path) -> int:
    """Writes all images that have a mask, and returns their number; raises ValueError for none."""
    count = 0
    for image in sorted(original.glob("*/*/**/image/*.*")):
        domain, part = image.relative_to(original).parts[:2]
        masks = sorted(image.parent.with_name("mask").glob(f"{image.stem}.*"))
        if part not in ("train", "test") or len(masks) != 1:
            raise ValueError(
                f"{image} needs one mask, {image.parent.with_name('mask') / image.stem}.*, and a "
                f"folder train or test above it; there are {len(masks)} masks"
            )
        image_path = folder / domain / part / "images" / image.name
        mask_path = folder / domain / part / "masks" / f"{image.stem}.png"
        for path in (image_path, mask_path):
            path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image, image_path)
        with Image.open(masks[0]) as mask:
            Image.fromarray(classes_of(np.asarray(mask.convert("L")))).save(mask_path)
        count += 1
    if not count:
        raise ValueError(f"{original} holds no DOMAIN/{{train,test}}/.../image/NAME")
    return count


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(convert(*map(Path, sys.argv[1:])), "images with masks")
