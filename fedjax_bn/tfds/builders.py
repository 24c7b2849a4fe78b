"""Defines the builders, which list images as `fedjax_bn.data` does and keep them as published.

Every domain is a split. An example has `image` (the file's own bytes, or PNG if it is not a JPEG or
PNG in RGB), `label`, `name` (the file, relative to the dataset's folder) and `part` (0 training, 1
validation, 2 test of the official lists; -1 without lists).
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
from fedjax_bn.data.sets.folders import Published, domain_folders
from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS, load
from fedjax_bn.data.source import Pool


class _ImageFolders(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Builds a dataset of image folders; `manual_dir` is the folder of the images."""

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
        # decodes all images, to one pixel, so that the error names every unreadable one
        source = load(self.published, folder, image_size=1)
        root, _ = domain_folders(folder, self.published)
        # tensorflow-datasets allows no spaces in names of splits
        return {pool.name.replace(" ", "_"): _examples(pool, root) for pool in source.pools}

    def _generate_examples(self, **_: Any) -> Iterator:
        raise NotImplementedError("splits have generators of their own")


def _examples(pool: Pool, root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, example) for all images of a domain."""
    for k, name in enumerate(map(str, pool.names)):
        part = -1 if pool.parts is None else int(pool.parts[k])
        image, label = _encoded(root / name), int(pool.labels[k])
        yield name, {"image": image, "label": label, "name": name, "part": part}


def _encoded(file: Path) -> BytesIO:
    """Returns the file unchanged if it is a JPEG or PNG in RGB, otherwise as PNG in RGB."""
    raw = read_image(file)
    image = open_raster(raw)
    if image.mode == "RGB" and image.format in ("JPEG", "PNG"):
        return BytesIO(raw)
    content, tags = BytesIO(), Image.Exif()
    if (tag := orientation_of(image)) != 1 and not turned_by_pillow(image):
        tags[ORIENTATION] = tag
    to_rgb(image).save(content, "PNG", exif=tags)
    return BytesIO(content.getvalue())


def _builder(name: str, published: Published) -> type[_ImageFolders]:
    """Returns the builder of a dataset, registered by its name in snake case."""
    content = {
        "__doc__": f"{published.title}, see `fedjax_bn.data.sets.image_folders`.",
        "__module__": __name__,
        "MANUAL_DOWNLOAD_INSTRUCTIONS": published.where,
        "published": published,
    }
    return type(name, (_ImageFolders,), content)


BUILDERS = {
    name: _builder(name.title().replace("_", ""), IMAGE_FOLDERS[name])
    for name in ("pacs", "vlcs", "officehome", "office_caltech10")
}
