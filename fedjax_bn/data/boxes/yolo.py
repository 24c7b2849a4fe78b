"""The text files of YOLO's detectors: one for each image.

    labels/train/NAME.txt   images/train/NAME.jpg   data.yaml

A line is "class cx cy w h", the number of the class, the centre, width and height in shares of the
image; or "class x1 y1 x2 y2 x3 y3 ...", the corners of an outline, whose extent is the box. Images
may also be in train/images, or beside their text files. The names of the classes are under `names`
of a YAML file, or in classes.txt, one per line, which may be among the labels; without either they
are numbers. An image without a text file has no boxes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.data.boxes.labelled import Box, Labelled, Slips, part_of
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import files_below, is_image

_Files = list[tuple[Path, Path | None]]  # images, each with its text file


def yolo_files(folder: Path) -> _Files:
    """Returns the images of a domain, each with its text file; none if no image has one."""
    files: _Files = []
    for image in (file for file in files_below(folder) if is_image(file.name)):
        # images/train/a.jpg has labels/train/a.txt; an image elsewhere has it beside.
        parts = list(image.relative_to(folder).with_suffix(".txt").parts)
        folders = [name.lower() for name in parts[:-1]]
        if "images" in folders:
            position = len(folders) - 1 - folders[::-1].index("images")
            parts[position] = "Labels" if parts[position] == "Images" else "labels"
        label_file = folder.joinpath(*parts)
        files.append((image, label_file if label_file.is_file() else None))
    return files if any(label_file for _, label_file in files) else []


def read_yolo(
    root: Path, folders: Mapping[str, Path], files: Mapping[str, _Files], slips: Slips
) -> tuple[list[str], dict[str, list[Labelled]]]:
    """Returns the names of all classes, and domain -> its images, with boxes in shares.

    Args:
      root: around the domains; it may name the classes.
      folders: of the domains.
      files: domain -> what `yolo_files` returns.
      slips: counts the images without a text file.

    Raises:
      ValueError: a file is damaged or not in the form; it is named, with the line.
    """
    classes = _class_names([root, *folders.values()])
    domains: dict[str, list[Labelled]] = {}
    for domain, pairs in files.items():
        domains[domain] = []
        for image, label_file in pairs:
            boxes = _read_boxes(label_file, classes) if label_file else []
            slips.add(
                "images without a text file, which have no boxes", count=int(label_file is None)
            )
            part = part_of(image.relative_to(folders[domain]).parts[:-1])
            domains[domain].append(Labelled(image, str(label_file or image), boxes, part=part))
    if classes:
        return classes, domains
    # If no file names the classes, the greatest number shows how many there are.
    labels = [int(box.label) for rows in domains.values() for row in rows for box in row.boxes]
    return [str(number) for number in range(max(labels, default=-1) + 1)], domains


def _class_names(folders: Sequence[Path]) -> list[str]:
    """Returns the names in the first YAML or text file of names in these folders, if any."""
    import yaml  # installed with flax

    for folder in folders:
        listed = [folder / "classes.txt", folder / "labels" / "classes.txt"]
        for path in (*sorted(folder.glob("[!.]*.y*ml")), *filter(Path.is_file, listed)):
            with corruption_named(path):
                text = path.read_text("utf-8-sig")
                if path.suffix == ".txt":
                    names: Any = [line.strip() for line in text.splitlines() if line.strip()]
                else:
                    # The safe loader creates no objects of Python classes.
                    content = yaml.safe_load(text)
                    names = content.get("names") if isinstance(content, dict) else None
                if isinstance(names, dict):
                    names = [names[number] for number in range(len(names))]
                if names and len(set(map(str, names))) < len(names):
                    raise ValueError(f"`names` has a name twice: {', '.join(map(str, names))}")
            if names:
                return list(map(str, names))
    return []


def _read_boxes(path: Path, classes: Sequence[str]) -> list[Box]:
    """Returns the boxes of a text file; a label is a name, or its number if there are no names."""
    boxes = []
    with corruption_named(path):
        for row, line in enumerate(path.read_text("utf-8-sig").splitlines(), 1):
            if not line.strip():
                continue
            try:
                label, *numbers = map(float, line.split())
                if len(numbers) < 4 or len(numbers) % 2:
                    raise ValueError(f"{len(numbers)} numbers after the class, not cx cy w h")
                if not label.is_integer() or not 0 <= label < (len(classes) or label + 1):
                    raise ValueError(f"class {label:g} is not one of the {len(classes)} classes")
            except ValueError as error:
                raise ValueError(f"line {row}: {error}") from error
            if len(numbers) == 4:
                x, y, width, height = numbers
                corners = x - width / 2, y - height / 2, x + width / 2, y + height / 2
            else:
                across, down = numbers[::2], numbers[1::2]
                corners = min(across), min(down), max(across), max(down)
            boxes.append(Box(row, classes[int(label)] if classes else f"{label:.0f}", corners))
    return boxes
