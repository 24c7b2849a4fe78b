"""The builders: each reads its images as `fedjax_bn.data` does, and keeps them as published.

Every domain is a split. An example has `image` (the file's own bytes, or PNG where it is no JPEG or
PNG in RGB), `label`, `name` (the file as seen from the dataset's folder) and `part` (0 training,
1 validation, 2 test of the official lists; -1 where there are none).
"""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from fedjax_bn.data.pixels.raster import (
    ORIENTATION,
    open_raster,
    orientation_of,
    read_image,
    to_rgb,
    turned_by_pillow,
)
from fedjax_bn.data.sets.folders import find_root
from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS, load
from fedjax_bn.data.sets.published import Published
from fedjax_bn.data.source import Pool

_NO_PART = -1


class _ImageFolders(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """What the four have in common, as tensorflow-datasets wants it; `manual_dir` has the images.

    Attributes:
      published: what the publication says of the dataset.
    """

    VERSION = tfds.core.Version("1.0.0")
    published: Published

    def __init__(self, *, file_format: str = "array_record", **options: Any):
        super().__init__(file_format=file_format, **options)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=list(self.published.classes)),
            "name": tfds.features.Text(),
            "part": tfds.features.Scalar(dtype=np.int64),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"{self.published.name}: {self.published.where}.",
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        folder = Path(dl_manager.manual_dir)
        # images of one pixel: this lists all and finds every one that cannot be read
        source = load(self.published, folder, image_size=1)
        root = find_root(folder, self.published)
        return {_split_name(pool.name): _examples(pool, root) for pool in source.pools}

    def _generate_examples(self, **_: Any) -> Iterator:
        raise NotImplementedError("splits have generators of their own")


def _split_name(domain: str) -> str:
    """The name of a domain's split: tensorflow-datasets allows no spaces."""
    return domain.replace(" ", "_")


def _examples(pool: Pool, root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, example) for all images of a domain."""
    for k, name in enumerate(map(str, pool.names)):
        yield (
            name,
            {
                "image": _encoded(root / name),
                "label": int(pool.labels[k]),
                "name": name,
                "part": _NO_PART if pool.parts is None else int(pool.parts[k]),
            },
        )


def _encoded(file: Path) -> BytesIO:
    """The file as it is, if it is a JPEG or PNG in RGB; otherwise as PNG in RGB."""
    raw = read_image(file)
    image = open_raster(raw)
    if image.mode == "RGB" and image.format in ("JPEG", "PNG"):
        return BytesIO(raw)
    content, tags = BytesIO(), Image.Exif()
    if (tag := orientation_of(image)) != 1 and not turned_by_pillow(image):
        tags[ORIENTATION] = tag
    to_rgb(image).save(content, "PNG", exif=tags)
    return BytesIO(content.getvalue())


class Pacs(_ImageFolders):
    """PACS, see `fedjax_bn.data.sets.image_folders`."""

    published = IMAGE_FOLDERS["pacs"]
    MANUAL_DOWNLOAD_INSTRUCTIONS = published.where


class Vlcs(_ImageFolders):
    """VLCS, see `fedjax_bn.data.sets.image_folders`."""

    published = IMAGE_FOLDERS["vlcs"]
    MANUAL_DOWNLOAD_INSTRUCTIONS = published.where


class Officehome(_ImageFolders):
    """OfficeHome, see `fedjax_bn.data.sets.image_folders`."""

    published = IMAGE_FOLDERS["officehome"]
    MANUAL_DOWNLOAD_INSTRUCTIONS = published.where


class OfficeCaltech10(_ImageFolders):
    """Office-Caltech10, see `fedjax_bn.data.sets.image_folders`."""

    published = IMAGE_FOLDERS["office_caltech10"]
    MANUAL_DOWNLOAD_INSTRUCTIONS = published.where


BUILDERS = {builder.name: builder for builder in (Pacs, Vlcs, Officehome, OfficeCaltech10)}
