"""Images of one's own: any folder of the form DOMAIN/CLASS/*.jpg.

    photo/dog/1.jpg  photo/cat/2.jpg  sketch/dog/a.png  sketch/cat/b.png

A domain is a folder that holds folders; its classes are the folders in it, and every domain must
have them all. Images may have any size and any format that `folders` lists; they are stretched to
squares and normalized by ImageNet's mean and standard deviation, as PACS is. Folders may be written
in any case and with or without spaces, - and _. A path that ends in `.npz` is read by `npz`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets import image_folders
from fedjax_bn.data.sets.folders import (
    Published,
    match_folders,
    plain_name,
    spelled,
    subfolders,
)
from fedjax_bn.data.source import Source

_WHERE = (
    "it must hold a folder of each domain, and in it a folder of images of each class, "
    "DOMAIN/CLASS/*.jpg, the same classes in all domains; data.domains and data.classes choose some"
)


def load(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Returns folders of images as u8[N, image_size, image_size, 3], one pool a domain.

    Args:
      path: the folder of the domains.
      image_size: pixels a side.
      domains: names of their folders, in that order; empty for all, by name.
      classes: names of their folders, in the order of the labels; empty for all, by name.
      **how: `cache`, `progress`, `max_megapixels` and `orientation` of `decode`.

    Returns:
      Source "folders", without parts.

    Raises:
      FileNotFoundError: there is no such folder, or no folder of a domain that is asked for.
      ValueError: a domain or class is asked for twice, a domain lacks a class, or an image cannot
        be read.
      OSError: the cache cannot be written.
    """
    for key, names in (("domains", domains), ("classes", classes)):
        plain = [plain_name(name) for name in names]
        twice = [name for name, one in zip(names, plain, strict=True) if plain.count(one) > 1]
        if twice:
            raise ValueError(f"data.{key} names {first_few(twice)} more than once; name each once")
    if not path:
        raise ValueError(f"folders needs data.path: {_WHERE}")
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"data.path {path} is not a folder: {_WHERE}")
    inside = subfolders(path)
    found = {one.name: one for one in inside if subfolders(one)}
    if domains:
        found = match_folders(inside, spelled(*domains))
    if not found:
        raise FileNotFoundError(f"data.path {path} has no domain: {_WHERE}")
    if not classes:
        first: dict[str, str] = {}  # of two names that differ in case and separators only
        for name in sorted({one.name for folder in found.values() for one in subfolders(folder)}):
            first.setdefault(plain_name(name), name)
        classes = tuple(first.values())
    dataset = Published(
        name="folders",
        title="folders",
        about="images of one's own",
        domains=spelled(*(domains or found)),
        classes=spelled(*classes),
        counts={},
        where=_WHERE,
    )
    return image_folders.load(dataset, path, image_size=image_size, **how)
