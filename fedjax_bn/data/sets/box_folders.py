"""Any folder of images with boxes, in COCO's or YOLO's form; domains are subfolders.

    clear/images/1.jpg  clear/labels/1.txt  fog/images/2.jpg  fog/labels/2.txt     (YOLO)
    clear/annotations/instances_train.json  clear/images/1.jpg  ...                (COCO)

A folder that is itself in such a form is one domain. If folders or files name the part (train, val,
test) of every image of a domain, the parts are its official split. Images keep their shape.

YOLO has a text file for each image, in labels/ or beside it; without one it has no boxes. A line is
"class cx cy w h", the number of the class and the centre, width and height in shares of the image,
or "class x1 y1 x2 y2 x3 y3 ...", the corners of an outline, whose extent is the box. The names of
the classes are under `names` of a YAML file or in classes.txt; without either they are numbers.

COCO (Lin et al., ECCV 2014) has files of JSON with "images", "categories" and "annotations" for
many images, which are in images/, beside the file, or in train/. Crowds stay crowds.

Boxes refer to the image as viewers show it, turned upright by its EXIF, or, with the orientation
"stored", to the rows of its file. If the labels state the width and height of the other one of
these two frames, the boxes are turned from that frame into the used one.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.arguments.text import first_few
from fedjax_bn.data.labels import BOXES, CLASS, PADDING, crowd
from fedjax_bn.data.pixels import decode
from fedjax_bn.data.pixels.cache import cached_numbers
from fedjax_bn.data.pixels.decode import STORED, UPRIGHT
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import chosen_folders, files_below, is_image, subfolders
from fedjax_bn.data.source import TRAIN, Pool, Source, check_source, part_in

_WHERE = (
    "data.path must hold images with boxes, or such a folder for each of data.domains, in one form:"
    " images/*.jpg with labels/*.txt (YOLO) or annotations/*.json (COCO; launch/convert makes it)"
)
_CROWDS = "crowds (groups of objects): no client learns them, no detection is wrong there"
_OTHER_CLASS = "boxes of classes that data.classes does not name left out"
_NO_AREA = "boxes without area, or outside their image, left out"
_CLIPPED = "boxes that reach out of their image cut at its border"
_MOST = 100  # boxes of an image
_SMALLEST = f"boxes left out, the smallest of images with more than {_MOST}"
_BORDER = 1.0  # pixels by which formats disagree on where a box ends


class _Labelled(NamedTuple):
    """An image and its boxes, of all classes, as written in the labels."""

    file: Path
    # name of the class; x1, y1, x2, y2 from the left and upper edge; whether it is a crowd
    boxes: Sequence[tuple[str, tuple[float, ...], bool]]
    size: tuple[int, int] | None  # width and height, if the labels state them
    part: int | None  # TRAIN, VALIDATION or TEST, if names state it


def load_boxes(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    name: str = "boxes",
    **options: Any,
) -> Source:
    """Reads images as u8[N, image_size, image_size, 3] with their boxes, one pool a domain.

    Boxes are cut at the border of their image, and an image with more than 100 keeps its largest;
    the notes count what was cut or left out.
    Boxes of classes that are not chosen are left out. `name` is that of the source.
    """
    root = Path(path or "PATH")
    folders = chosen_folders(root, domains, _is_domain(root), _WHERE)
    classes_read, labelled, in_pixels = _read_labels(root, folders)
    if absent := [label for label in classes if label not in classes_read]:
        present = first_few(classes_read)
        raise ValueError(f"{root} has no class {first_few(absent)} of data.classes, but {present}")
    numbers = {label: number for number, label in enumerate(classes or classes_read)}
    rows = [row for of_domain in labelled.values() for row in of_domain]
    files = [row.file for row in rows]
    sample_names = np.array(decode.relative_names(files, root))
    if missing := [str(file) for file in files if not file.is_file()]:  # before hours of decoding
        raise FileNotFoundError(f"labelled images are missing, unpack them: {first_few(missing)}")
    images, converted = decode.decode(files, image_size, root=root, letterbox=True, **options)
    counted: Counter[str] = Counter()  # what is changed or left out, and how often
    frames, how = _frames_of(files, root, **options).tolist(), (numbers, in_pixels, counted)
    placed = [_place(row, frame, *how) for row, frame in zip(rows, frames, strict=True)]
    longest = max(1, *(len(image_classes) for _, image_classes in placed))
    boxes = np.zeros((len(placed), longest, 4), np.float32)
    box_classes = np.full((len(placed), longest), PADDING, np.int32)
    for k, (corners, image_classes) in enumerate(placed):
        boxes[k, : len(corners)] = decode.to_square(corners, *frames[k][:2], image_size)
        box_classes[k, : len(corners)] = image_classes
    # Rounded to float32, a box of nearly no area may have none.
    sound = (boxes[..., 2:] > boxes[..., :2]).all(-1)
    boxes = np.where(sound[..., None], boxes, 0)
    box_classes = np.where(sound, box_classes, PADDING)
    counts = (box_classes >= 0).sum(1)
    notes = [f"{count} {kind}" for kind, count in counted.items() if count]
    if not counts.any():
        raise ValueError(f"{root} has {len(files)} images, but none with a box: {'; '.join(notes)}")
    pools, start = [], 0
    for domain, of_domain in labelled.items():
        members = slice(start, start := start + len(of_domain))
        labels = {BOXES: boxes[members], CLASS: box_classes[members]}
        parts = [row.part for row in of_domain]
        # A split is official only if it says of every image what it is for.
        is_official = None not in parts and TRAIN in parts
        official = np.array(parts, np.int8) if is_official else None
        pools.append(Pool(domain, images[members], labels, sample_names[members], official))
    about = f"{counts.sum()} boxes in {len(files)} images, {(counts == 0).sum()} of them without "
    about += f"boxes, at most {counts.max()} in one"
    # YOLO's detectors read u8/255, without mean and deviation.
    key = f"letterbox {decode.hash_of_files(files, root, image_size)}"
    form = name, tuple(numbers), tuple(pools), (0.0,) * 3, (1.0,) * 3
    return check_source(Source(*form, (about, *notes, *converted), key=key))


def _place(
    row: _Labelled,
    frame: Sequence[int],
    numbers: Mapping[str, int],
    in_pixels: bool,
    counted: Counter[str],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the boxes f64[n, 4] of an image in shares of it, and their classes i32[n]."""
    width, height, tag = frame
    chosen = [box for box in row.boxes if box[0] in numbers]
    classes = [crowd(numbers[name]) if is_crowd else numbers[name] for name, _, is_crowd in chosen]
    counted[_OTHER_CLASS] += len(row.boxes) - len(chosen)
    counted[_CROWDS] += sum(is_crowd for _, _, is_crowd in chosen)
    corners = np.array([corners for _, corners, _ in chosen], np.float64).reshape(-1, 4)
    image = np.array([width, height] * 2, np.float64)
    # Only tags above 4 exchange width and height, so only there the size shows the boxes' frame.
    if tag > 4 and width != height and row.size == (height, width):
        top, left, bottom, right = (corners / image[[1, 0, 1, 0]]).T  # rows become columns
        if tag in (6, 7):
            left, right = 1 - right, 1 - left
        if tag in (7, 8):
            top, bottom = 1 - bottom, 1 - top
        corners = np.stack([left, top, right, bottom], axis=1)
    elif in_pixels:
        corners = corners / image
    inside = np.clip(corners, 0, 1)
    has_area = (inside[:, 2:] > inside[:, :2]).all(1)
    is_cut = (np.abs(inside - corners) * image > _BORDER).any(1) & has_area
    counted[_NO_AREA] += int((~has_area).sum())
    counted[_CLIPPED] += int(is_cut.sum())
    index = np.flatnonzero(has_area)
    counted[_SMALLEST] += max(len(index) - _MOST, 0)
    areas = np.prod(inside[index, 2:] - inside[index, :2], axis=1)
    index = index[np.sort(np.argsort(-areas, kind="stable")[:_MOST])]
    return inside[index], np.array(classes, np.int32)[index]


def _frames_of(
    files: Sequence[Path], root: Path, cache: Any = None, orientation: str = UPRIGHT, **_: Any
) -> np.ndarray:
    """Returns i32[N, 3], cached: width and height of each image as used, and a tag."""
    # The EXIF tag turns boxes of the image's other frame into this one: from the stored frame if
    # images are used upright, else from the upright frame.

    def frame(file: Path) -> tuple[int, int, int]:
        image = decode.open_raster(file.read_bytes())
        tag, (width, height) = decode.orientation_of(image), image.size
        if image.format != "TIFF":  # which Pillow turns itself
            if orientation == STORED:
                tag = {6: 8, 8: 6}.get(tag, tag)  # every other turn is its own inverse
            elif tag > 4:
                width, height = height, width
        return width, height, tag

    form = f"-{STORED}" * (orientation == STORED)
    name = f"{root.resolve().name or 'images'}-sizes{form}-{decode.hash_of_files(files, root, 0)}"
    return cached_numbers(cache, name, files, frame, 3)


def _is_domain(root: Path) -> bool:
    """Returns whether a folder is itself in one of the forms, or has no folders."""
    names = [folder.name for folder in subfolders(root)]
    is_form = {"images", "labels", "annotations"} & {*names} or part_in(names) is not None
    # So it is with labels beside its images; a lone picture is no domain.
    images = [file for file in root.glob("*") if is_image(file.name)]
    texts = [file for file in images if file.with_suffix(".txt").is_file()]
    has_labels = texts or (images and any(root.glob("[!.]*.json")))
    return root.is_dir() and bool(is_form or has_labels or not names)


def _read_labels(
    root: Path, folders: Mapping[str, Path]
) -> tuple[list[str], dict[str, list[_Labelled]], bool]:
    """Returns the names of all classes, domain -> its images, and whether boxes are in pixels."""
    # Otherwise boxes are in shares of their image. The domains have one form, and `root` around
    # them may name the classes.
    files = {domain: files_below(folder) for domain, folder in folders.items()}
    images = {
        d: [file for file in of_domain if is_image(file.name)] for d, of_domain in files.items()
    }
    labelled: dict[str, list[_Labelled]] = {}
    coco = [d for d in folders if not any(_label_file(i, folders[d]).is_file() for i in images[d])]
    if not coco:
        class_names = _class_names([root, *folders.values()])
        for domain, folder in folders.items():
            labelled[domain] = [_read_yolo(image, folder, class_names) for image in images[domain]]
        if not class_names:  # the greatest number shows how many there are
            boxes = [box for rows in labelled.values() for row in rows for box in row.boxes]
            largest = max((int(label) for label, _, _ in boxes), default=-1)
            class_names = list(map(str, range(largest + 1)))
        return class_names, labelled, False
    json_files = {d: [file for file in files[d] if file.suffix == ".json"] for d in coco}
    faults = [domain for domain in coco if not json_files[domain]]
    if faults or len(coco) < len(folders):
        folder = folders[(faults or coco)[0]]
        raise ValueError(f"{folder} has no boxes, or not in the form of other domains: {_WHERE}")
    classes: dict[str, None] = {}
    for domain, paths in json_files.items():
        # COCO's other files (of key points, captions) have the same keys as its instances_*.
        instances = [path for path in paths if path.stem.startswith("instances")] or paths
        rows = [_read_coco(path, folders[domain], classes) for path in instances]
        labelled[domain] = [row for of_file in rows for row in of_file]
    return list(classes), labelled, True


def _label_file(image: Path, folder: Path) -> Path:
    """Returns where an image of a domain has its text file in YOLO's form."""
    # images/train/a.jpg has labels/train/a.txt; an image elsewhere has it beside.
    *above, name = image.relative_to(folder).with_suffix(".txt").parts
    if "images" in above:
        above[len(above) - 1 - above[::-1].index("images")] = "labels"
    return folder.joinpath(*above, name)


def _class_names(folders: Sequence[Path]) -> list[str]:
    """Returns the names in the first YAML or text file of names in these folders, if any."""
    import yaml  # installed with flax

    for folder in folders:
        listed = [folder / "classes.txt", folder / "labels" / "classes.txt"]
        for path in (*sorted(folder.glob("[!.]*.y*ml")), *filter(Path.is_file, listed)):
            with corruption_named(path):
                names: Any = path.read_text("utf-8-sig")
                if path.suffix == ".txt":
                    names = [line.strip() for line in names.splitlines() if line.strip()]
                else:
                    # The safe loader creates no objects of Python classes.
                    names = (yaml.safe_load(names) or {}).get("names")
                if isinstance(names, dict):
                    names = [names[number] for number in range(len(names))]
            if names:
                return list(map(str, names))
    return []


def _read_yolo(image: Path, folder: Path, classes: Sequence[str]) -> _Labelled:
    """Returns an image of a domain with boxes in shares; without classes, labels are numbers."""
    path = _label_file(image, folder)
    with corruption_named(path):
        lines = path.read_text("utf-8-sig").splitlines() if path.is_file() else []
        rows = [(number, line.split()) for number, line in enumerate(lines, 1)]
        boxes = [_read_line(words, number, classes) for number, words in rows if words]
    return _Labelled(image, boxes, None, part_in(image.relative_to(folder).parts[:-1]))


def _read_line(
    words: Sequence[str], row: int, classes: Sequence[str]
) -> tuple[str, tuple[float, ...], bool]:
    label, numbers = words[0], []
    with suppress(ValueError):  # of a word that is no number
        label, *numbers = map(float, words)
    if len(numbers) < 4 or len(numbers) % 2 or label not in range(len(classes) or 10**6):
        raise ValueError(f"line {row} is not CLASS cx cy w h of {len(classes)} classes")
    across, down = numbers[::2], numbers[1::2]
    if len(numbers) == 4:
        (x, width), (y, height) = across, down
        across, down = [x - width / 2, x + width / 2], [y - height / 2, y + height / 2]
    corners = min(across), min(down), max(across), max(down)
    return classes[int(label)] if classes else f"{label:.0f}", corners, False


def _read_coco(path: Path, folder: Path, classes: dict[str, None]) -> list[_Labelled]:
    """Returns the images of a file in a domain's folder, and adds its categories to `classes`."""
    with corruption_named(path):
        content = json.loads(path.read_text("utf-8-sig"))
        rows, categories = content["images"], content["categories"]
        class_names = {row["id"]: str(row["name"]) for row in categories}
        boxes: dict[Any, list[Any]] = {row["id"]: [] for row in rows}
        if len(boxes) < len(rows) or len(class_names) < len(categories):
            raise ValueError("two images or two categories have one id")
        for row in content["annotations"]:
            x, y, width, height = map(float, row["bbox"])
            label, corners = class_names[row["category_id"]], (x, y, x + width, y + height)
            boxes[row["image_id"]].append((label, corners, bool(row.get("iscrowd"))))
        names = [PurePosixPath(row["file_name"]) for row in rows]  # COCO writes / on every system
        if outside := [str(name) for name in names if name.is_absolute() or ".." in name.parts]:
            raise ValueError(f"'file_name' {outside[0]!r} leads out of the folder")
        sizes = [(row["width"], row["height"]) if "width" in row else None for row in rows]
    classes |= dict.fromkeys(class_names.values())
    # A file's folders and the words of its name may both name a part.
    words = path.stem.split("_")
    part = part_in([*path.relative_to(folder).parts[:-1], *words])
    # Names are relative to the first of these folders that holds the first image.
    places = [path.parent, path.parent / "images", folder / "images", folder]
    places += [base / word for word in words for base in (folder, folder / "images")]
    base = next((p for p in places if names and (p / names[0]).is_file()), folder / "images")
    return [
        _Labelled(base / name, image_boxes, size, part)
        for name, image_boxes, size in zip(names, boxes.values(), sizes, strict=True)
    ]
