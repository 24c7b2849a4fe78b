"""Any folder of images with boxes, in COCO's, Pascal VOC's or YOLO's form; domains are subfolders.

    clear/images/1.jpg  clear/labels/1.txt  fog/images/2.jpg  fog/labels/2.txt     (YOLO)
    clear/annotations/1.xml  clear/images/1.jpg  ...                               (VOC)
    clear/annotations/instances_train.json  clear/images/1.jpg  ...                (COCO)

A folder that is itself of such a form is one domain, which `data.num_clients` shares out. Parts
(train, val, test) that folders or files name are taken for the official split where all images of a
domain have one. Images keep their shape, see `pixels.letterbox`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_bn.data.boxes import coco, voc, yolo_text
from fedjax_bn.data.boxes.assemble import Squares, to_source
from fedjax_bn.data.boxes.folders import domain_folders
from fedjax_bn.data.boxes.labelled import Labelled, Slips, numbers_of
from fedjax_bn.data.source import Source

_WHERE = (
    "it must hold images with boxes, or a folder of such for each domain: images/*.jpg with "
    "labels/*.txt (YOLO), annotations/*.xml (VOC) or annotations/*.json (COCO)"
)
# domain -> what lies in its folder, as a form's `find` returns it
_Found = dict[str, Any]
_Owned = dict[str, list[Labelled]]


class _Form(NamedTuple):
    """A form in which boxes are published.

    Attributes:
      name: to end a sentence with.
      find: `find(root, folder, slips)` is what a domain has of this form; empty where nothing.
      read: `read(root, folders, found, classes, slips) -> (names of all classes, images)`.
      shares: see `assemble.Squares`.
    """

    name: str
    find: Callable[[Path, Path, Slips], Any]
    read: Callable[[Path, dict[str, Path], _Found, Sequence[str], Slips], tuple[list[str], _Owned]]
    shares: bool = False


def load(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Images as u8[N, image_size, image_size, 3] with their boxes, one pool a domain.

    Args:
      path: the folder.
      image_size: pixels a side of the squares.
      domains: names of folders in it; empty for all.
      classes: which, in the order of their numbers; empty for all.
      **how: `max_boxes`, `cache`, `progress`, `max_megapixels` and `orientation` of
        `assemble.Squares`.

    Returns:
      Source "boxes".

    Raises:
      FileNotFoundError: there is no such folder, or images are missing.
      ValueError: a file is damaged or not of the form; it is named, with the row.
      OSError: the cache cannot be written.
    """
    if not path:
        raise ValueError(f"boxes needs data.path: {_WHERE}")
    root = Path(path)
    folders = domain_folders(root, domains, _WHERE)
    slips = Slips()
    form, found = _find(root, folders, slips)
    known, owned = form.read(root, folders, found, classes, slips)
    empty = [name for name, images in owned.items() if not images]
    if empty:
        raise ValueError(f"{folders[empty[0]]} has no labelled images: {_WHERE}")
    return to_source(
        "boxes",
        root,
        owned,
        classes or known,
        slips,
        Squares(image_size, shares=form.shares, **how),
        notes=(f"{root} is read as {form.name}",),
    )


def _find(root: Path, folders: dict[str, Path], slips: Slips) -> tuple[_Form, _Found]:
    """The form of all domains, and what they have of it."""
    forms, found = {}, {}
    for name, folder in folders.items():
        for form in _FORMS:
            if content := form.find(root, folder, slips):
                forms[name], found[name] = form, content
                break
        else:
            choose = "; data.domains names the folders to be read" if len(folders) > 1 else ""
            raise ValueError(f"{folder} has no boxes in a known form: {_WHERE}{choose}")
    first = next(iter(forms))
    for name, form in forms.items():
        if form is not forms[first]:
            raise ValueError(
                f"{folders[name]} is in the form of {form.name}, but {folders[first]} in that of "
                f"{forms[first].name}: bring both into one, or choose by data.domains"
            )
    return forms[first], found


def _read_coco(
    root: Path, folders: dict[str, Path], found: _Found, classes: Sequence[str], slips: Slips
) -> tuple[list[str], _Owned]:
    names = {
        c: None for files in found.values() for one in files for c in coco.categories(*one).values()
    }
    numbers = numbers_of(list(names), classes, str(root))
    return list(names), {
        name: [
            image
            for path, content in files
            for image in coco.labelled(path, content, folders[name], numbers, slips)
        ]
        for name, files in found.items()
    }


def _read_voc(
    root: Path, folders: dict[str, Path], found: _Found, classes: Sequence[str], slips: Slips
) -> tuple[list[str], _Owned]:
    names = voc.classes_of(found)
    numbers = numbers_of(names, classes, str(root))
    return names, {
        name: voc.labelled(rows, folders[name], numbers, slips) for name, rows in found.items()
    }


def _find_yolo(root: Path, folder: Path, slips: Slips) -> list[yolo_text.Found]:
    del root, slips
    found = yolo_text.find(folder)
    return found if any(text for _, text in found) else []


def _read_yolo(
    root: Path, folders: dict[str, Path], found: _Found, classes: Sequence[str], slips: Slips
) -> tuple[list[str], _Owned]:
    named = yolo_text.class_names([root, *folders.values()])
    names = named or yolo_text.class_numbers([row for rows in found.values() for row in rows])
    chosen = numbers_of(names, classes, str(root))
    numbers = {k: chosen[name] for k, name in enumerate(names) if name in chosen}
    return names, {
        name: yolo_text.labelled(rows, folders[name], numbers, named, slips)
        for name, rows in found.items()
    }


# The first of which a domain has anything is its form.
_FORMS = (
    _Form("COCO's JSON", lambda root, folder, slips: coco.find(folder), _read_coco),
    _Form("Pascal VOC's XML", voc.find, _read_voc),
    _Form("YOLO's text files", _find_yolo, _read_yolo, shares=True),
)
