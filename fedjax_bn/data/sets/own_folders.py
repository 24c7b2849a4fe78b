"""Images of one's own: any folder of the form DOMAIN/CLASS/*.jpg.

    photo/dog/1.jpg  photo/cat/2.jpg  sketch/dog/a.png  sketch/cat/b.png

A domain is a folder that holds folders; its classes are the folders in it, and every domain must
have them all. Images may be of any size and of any kind that `folders` knows; they are stretched to
squares and normalized by ImageNet's mean and standard deviation, as PACS is. Folders may be spelled
in any case and with or without spaces, - and _. A path that ends in `.npz` is read by `npz`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets import image_folders
from fedjax_bn.data.sets.folders import match_folders, plain_name, subfolders
from fedjax_bn.data.sets.published import IMAGENET, Published, spelled
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
    """Folders of images as u8[N, image_size, image_size, 3], one pool a domain, without parts.

    Args:
      path: the folder of the domains.
      image_size: pixels a side.
      domains: names of their folders, in that order; empty for all, by name.
      classes: names of their folders, in the order of the labels; empty for all, by name.
      **how: `cache`, `progress`, `max_megapixels` and `orientation` of `decode`.

    Returns:
      Source "folders".

    Raises:
      FileNotFoundError: there is no such folder, or no folder of a domain that is asked for.
      ValueError: a domain or class is asked for twice, a domain lacks a class, or an image cannot
        be read.
      OSError: the cache cannot be written.
    """
    if not path:
        raise ValueError(f"folders needs data.path: {_WHERE}")
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"data.path {path} is no folder: {_WHERE}")
    _check_differ("domains", domains)
    _check_differ("classes", classes)
    found = {one.name: one for one in subfolders(path) if subfolders(one)}
    if domains:
        found = match_folders(subfolders(path), spelled(*domains))
    if not found:
        raise FileNotFoundError(f"data.path {path} has no domain: {_WHERE}")
    dataset = Published(
        name="folders",
        title="folders",
        about="images of one's own",
        domains=spelled(*(domains or found)),
        classes=spelled(*(classes or _classes_of(found.values()))),
        counts={},
        where=_WHERE,
        mean=IMAGENET[0],
        std=IMAGENET[1],
    )
    return image_folders.load(dataset, path, image_size=image_size, **how)


def _classes_of(folders: Sequence[Path]) -> list[str]:
    """The names of all class folders, sorted; of two spellings of one name the first."""
    names = sorted({inside.name for folder in folders for inside in subfolders(folder)})
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(plain_name(name), name)
    return list(first.values())


def _check_differ(key: str, names: Sequence[str]) -> None:
    """Raises ValueError if two names differ in spelling only."""
    plain = [plain_name(name) for name in names]
    twice = [name for name, one in zip(names, plain, strict=True) if plain.count(one) > 1]
    if twice:
        raise ValueError(f"data.{key} names {first_few(twice)} more than once; name each once")
