"""Any folder of images with boxes, in COCO's, Pascal VOC's or YOLO's form; domains are subfolders.

    clear/images/1.jpg  clear/labels/1.txt  fog/images/2.jpg  fog/labels/2.txt     (YOLO)
    clear/annotations/1.xml  clear/images/1.jpg  ...                               (VOC)
    clear/annotations/instances_train.json  clear/images/1.jpg  ...                (COCO)

A folder that is itself in such a form is one domain, which `data.num_clients` divides. If folders
or files name the part (train, val, test) of every image of a domain, the parts are its official
split. Images keep their shape, see `pixels.decode`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.data.boxes.assemble import Squares, to_source
from fedjax_bn.data.boxes.coco import COCO
from fedjax_bn.data.boxes.labelled import IMAGES, LABELS, Slips, numbers_of, part_of
from fedjax_bn.data.boxes.per_image import VOC, YOLO
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.folders import is_hidden, is_image, subfolders
from fedjax_bn.data.source import Source

_FORMS = (COCO, VOC, YOLO)  # a domain's form is the first that finds anything
_INSIDE = (*IMAGES, *LABELS, "imagesets")
_WHERE = (
    "it must hold images with boxes, or a folder of such for each domain: images/*.jpg with "
    "labels/*.txt (YOLO), annotations/*.xml (VOC) or annotations/*.json (COCO)"
)


def load(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Reads images as u8[N, image_size, image_size, 3] with their boxes, one pool a domain.

    Args:
      path: the folder.
      image_size: pixels a side of the squares.
      domains: names of folders in it; empty for all.
      classes: names, in the order of their numbers; empty for all.
      **how: `max_boxes`, `cache`, `progress`, `max_megapixels` and `orientation` of
        `assemble.Squares`.

    Returns:
      Source "boxes".

    Raises:
      FileNotFoundError: there is no such folder, or images are missing.
      ValueError: a file is damaged or not in the form; it is named, with the row.
      OSError: the cache cannot be written.
    """
    if not path:
        raise ValueError(f"boxes needs data.path: {_WHERE}")
    root = Path(path)
    folders, slips = _domain_folders(root, domains), Slips()
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
    form = forms[first]
    for name, other in forms.items():
        if other is not form:
            raise ValueError(
                f"{folders[name]} is in the form of {other.name}, but {folders[first]} in that of "
                f"{form.name}: bring both into one, or choose by data.domains"
            )
    known, owned = form.read(root, folders, found, slips)
    numbers = numbers_of(known, classes, str(root))
    empty = [name for name, images in owned.items() if not images]
    if empty:
        raise ValueError(f"{folders[empty[0]]} has no labelled images: {_WHERE}")
    squares = Squares(image_size, shares=form.shares, **how)
    notes = (f"{root} is read as {form.name}",)
    return to_source("boxes", root, owned, numbers, slips, squares, notes)


def _domain_folders(path: Path, domains: Sequence[str]) -> dict[str, Path]:
    """Returns the folder of each domain: the folders in `path`, or `path` itself if it is one set.

    Raises:
      FileNotFoundError: there is no such folder, or a requested domain is missing.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"data.path {path} is not a folder: {_WHERE}")
    inside = subfolders(path)
    is_part = [one.name.lower() in _INSIDE or part_of([one.name]) is not None for one in inside]
    found = {one.name: one for one in inside}
    # A folder that itself holds images with labels beside them is one set; a lone picture is not.
    files = [one for one in path.iterdir() if one.is_file() and not is_hidden(one.name)]
    labels = {one.stem for one in files if one.suffix.lower() in (".txt", ".xml")}
    of_all = any(one.suffix.lower() == ".json" for one in files)
    is_set = any(is_image(one.name) and (of_all or one.stem in labels) for one in files)
    if any(is_part) or not inside or is_set:
        found = {path.resolve().name: path}
    missing = [name for name in domains if name not in found]
    if missing:
        raise FileNotFoundError(
            f"data.domains names {first_few(missing)}, but data.path {path} has "
            f"{first_few(list(found))}: {_WHERE}"
        )
    return {name: found[name] for name in domains or found}
