"""Finds the mask of every image in a domain's folder.

Images are the image files in folders named `images`, masks those in folders named `masks` (or
another name of `IMAGES` and `MASKS`), with or without folders named train, val and test around or
in them; other folders, such as `fov` for the field of view, are left out. A domain without a folder
of masks has its images and masks in one folder.

The rule: masks are named like their images, with the same text before and after in the whole domain
(`*` and `*_mask`, `*` and `bw_*_black`), or with one ending or beginning for another (`*_training`
and `*_manual1`); the texts that pair most files are taken. Suffixes such as .png do not count. Then
every image needs one mask, and every mask an image.

Where the rule does not suit, patterns replace it, the image's and the mask's, relative to the
domain's folder: `images/{}_training.tif` and `masks/{}_manual1.gif`. {} matches the text that both
have in common, * any text; neither matches a /. A domain takes the first two patterns that fit an
image and a mask.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_bn.data.boxes.labelled import part_of
from fedjax_bn.data.messages import first_few

# Names of folders, in small letters.
IMAGES = ("images", "image", "imgs", "img", "jpegimages")
MASKS = (
    *("masks", "mask", "labels", "label", "annotations", "segmentations", "segmentation"),
    *("groundtruth", "ground_truth", "gt", "manual", "1st_manual"),
)
_SAMPLED = 20  # images that propose a rule
_PROPOSALS = 20  # rules that are tried
# The eyes, breasts or lungs of one person: the letters of a side between digits and signs.
_SIDE = re.compile(r"(?<![a-z])(?:l|r|left|right|od|os)(?![a-z])", re.IGNORECASE)
_REMEDY = "correct the files, or set data.pairs to patterns such as images/{}.png,masks/{}_mask.png"

_Key = tuple[str, ...]  # a file's folders, without those named in IMAGES and MASKS, and its stem


class Rule(NamedTuple):
    """The names of masks from those of images: `head * tail` becomes `before * after`."""

    head: str = ""
    tail: str = ""
    before: str = ""
    after: str = ""

    def mask_of(self, stem: str) -> str | None:
        """Returns the stem of an image's mask; None for an image of another name."""
        fits = stem.startswith(self.head) and stem.endswith(self.tail)
        core = stem[len(self.head) : len(stem) - len(self.tail)]
        return f"{self.before}{core}{self.after}" if fits and core else None

    def in_words(self) -> str:
        """Returns what the rule says."""
        return f"the mask of {self.head}*{self.tail} is {self.before}*{self.after}"


class Paired(NamedTuple):
    """The images of a domain and their masks.

    Attributes:
      images, masks: N files each.
      rule: how they were paired, in words.
      others: files that are neither.
    """

    images: list[Path]
    masks: list[Path]
    rule: str
    others: list[Path]


def find_pairs(files: Sequence[Path], folder: Path, patterns: Sequence[str] = ()) -> Paired:
    """Pairs the images and masks of a domain by the rule above, or by patterns.

    Args:
      files: images, or volumes of NIfTI, in the folder.
      folder: of the domain.
      patterns: an image's, a mask's, an image's, ...; empty for the rule.

    Raises:
      ValueError: an image has no mask or more than one, a mask has no image, or no file is an image.
    """
    if patterns:
        return _by_patterns(folder, files, patterns)
    images, masks, others = _by_folders(folder, files)
    if not masks:
        images, masks, rule = _in_one_folder(folder, images)
    else:
        rule = _best(list(images), list(masks), one_folder=False)
    if not images or rule is None:
        what = f"{len(images)} images and {len(masks)} masks that are not named alike"
        if not images or not masks:
            what = f"no {'masks' if images else 'images with masks'}"
        raise ValueError(f"{folder} has {what}: {_REMEDY}; data.domains chooses among folders")
    wanted = {key: (*key[:-1], rule.mask_of(key[-1])) for key in images}
    _check(
        folder,
        [images[key] for key in images if wanted[key] not in masks],
        [masks[key] for key in masks.keys() - set(wanted.values())],
        rule.in_words(),
    )
    return Paired(
        list(images.values()), [masks[wanted[key]] for key in images], rule.in_words(), others
    )


def _by_folders(
    folder: Path, files: Sequence[Path]
) -> tuple[dict[_Key, Path], dict[_Key, Path], list[Path]]:
    """Returns the images, the masks and the others of a domain's files.

    Without a folder of images, images are the files that are in no folder but those of parts.
    """
    found: dict[str, dict[_Key, list[Path]]] = {"image": {}, "mask": {}, "": {}}
    others, mask_folders = [], set()
    for file in files:
        above = file.relative_to(folder).parts[:-1]
        named = [name for name in above if name.lower() in (*IMAGES, *MASKS)]
        plain = [name for name in above if name not in named]
        if not named and any(part_of([name]) is None for name in plain):
            others.append(file)
            continue
        role = "" if not named else "image" if named[-1].lower() in IMAGES else "mask"
        mask_folders |= {named[-1]} if role == "mask" else set()
        found[role].setdefault((*plain, _stem(file)), []).append(file)
    if len(mask_folders) > 1:
        raise ValueError(
            f"{folder} has several folders of masks, {first_few(sorted(mask_folders))}: choose one "
            f"by data.pairs, such as images/{{}}.png,{min(mask_folders)}/{{}}.png"
        )
    if found["image"]:
        others += [file for twins in found.pop("").values() for file in twins]
    for twins in (twins for keyed in found.values() for twins in keyed.values()):
        if len(twins) > 1:
            raise ValueError(
                f"{twins[0]} and {twins[1]} have one name, but an image needs one mask: remove one "
                "of them, or choose by data.pairs"
            )
    images, masks = (
        {key: twins[0] for key, twins in keyed.items()}
        for keyed in (found["image"] or found[""], found["mask"])
    )
    return images, masks, others


def _stem(file: Path) -> str:
    return file.name[: -len(".nii.gz")] if file.name.lower().endswith(".nii.gz") else file.stem


def _in_one_folder(
    folder: Path, files: Mapping[_Key, Path]
) -> tuple[dict[_Key, Path], dict[_Key, Path], Rule | None]:
    """Returns the images and the masks of files in one folder, and their rule."""
    rule = _best(list(files), list(files), one_folder=True)
    if rule is None:
        return dict(files), {}, None
    wanted = {(*key[:-1], rule.mask_of(key[-1])) for key in files}
    masks = {key: file for key, file in files.items() if key in wanted}
    return {key: file for key, file in files.items() if key not in wanted}, masks, rule


def _best(images: Sequence[_Key], masks: Sequence[_Key], one_folder: bool) -> Rule | None:
    """Returns the rule that pairs most images with masks, of equals the one with fewest letters."""
    proposed: Counter[Rule] = Counter()
    for image in images[:: max(1, len(images) // _SAMPLED)]:
        for mask in masks:
            if mask[:-1] == image[:-1]:
                proposed.update(set(_proposals(image[-1], mask[-1], one_folder)))
    known, best = set(masks), (0, 0, None)
    for rule, _ in proposed.most_common(_PROPOSALS):
        count = sum((*key[:-1], rule.mask_of(key[-1])) in known for key in images)
        best = max(best, (count, -sum(map(len, rule)), rule), key=lambda one: one[:2])
    return best[2]


def _proposals(image: str, mask: str, one_folder: bool) -> Iterator[Rule]:
    """Yields the rules by which a mask may be an image's.

    In one folder a mask adds text to the name of its image, because otherwise either may be the
    mask.
    """
    if image in mask and not (one_folder and image == mask):
        before, _, after = mask.partition(image)
        yield Rule(before=before, after=after)
    if one_folder:
        return
    if start := _shared(image, mask):
        yield Rule(tail=image[start:], after=mask[start:])
    if end := _shared(image[::-1], mask[::-1]):
        yield Rule(head=image[:-end], before=mask[:-end])


def _shared(one: str, other: str) -> int:
    """Returns how many letters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))


def _by_patterns(folder: Path, files: Sequence[Path], patterns: Sequence[str]) -> Paired:
    """Pairs files by the first two patterns that fit an image and a mask."""
    names = {file: file.relative_to(folder).as_posix() for file in files}
    for image_pattern, mask_pattern in zip(patterns[::2], patterns[1::2], strict=True):
        found: list[dict[str, Path]] = []
        for pattern in (image_pattern, mask_pattern):
            text = re.escape(pattern).replace(r"\{\}", "([^/]+)").replace(r"\*", "[^/]*")
            own: dict[str, Path] = {}
            for file, name in names.items():
                if match := re.fullmatch(text, name):
                    twin = own.setdefault(match[1], file)
                    if twin is not file:
                        raise ValueError(
                            f"{twin} and {file} both fit {pattern} of data.pairs with {match[1]}: "
                            "make the pattern stricter, or remove one of them"
                        )
            found.append(own)
        images, masks = found
        if images and masks:
            break
    else:
        raise ValueError(
            f"{folder} has no image and mask of the patterns {first_few(patterns)} of data.pairs, "
            "which are relative to the folder of a domain: correct them"
        )
    rule = f"{image_pattern} has the mask {mask_pattern}"
    without = [file for key, file in images.items() if key not in masks]
    _check(folder, without, [file for key, file in masks.items() if key not in images], rule)
    used = {*images.values(), *masks.values()}
    others = [file for file in files if file not in used]
    return Paired(list(images.values()), [masks[key] for key in images], rule, others)


def _check(folder: Path, images: list[Path], masks: list[Path], rule: str) -> None:
    """Raises ValueError if there are images without masks, or masks without images."""
    for what, lacks, files in (("image", "mask", images), ("mask", "image", masks)):
        if files:
            names = first_few(sorted(file.relative_to(folder).as_posix() for file in files), 3)
            raise ValueError(
                f"{len(files)} {what}s in {folder} have no {lacks}, such as {names}, where {rule}: "
                f"{_REMEDY}"
            )


def groups_of(
    domain: str, folder: Path, images: Sequence[Path], pattern: str = ""
) -> tuple[list[str], str]:
    """Returns the names of a domain's images, equal for images of one group, and a note on them.

    Args:
      domain: its name.
      folder: of the domain.
      images: N files in it.
      pattern: a regular expression that is searched in the path of an image in the folder; the
        group is what its parentheses match, or the whole match. With "", images that differ only
        in a side (L and R, left and right, OD and OS) are one group, and each other image is alone.

    Raises:
      ValueError: the pattern does not fit an image.
    """
    names = [image.relative_to(folder).as_posix() for image in images]
    if pattern:
        matches = [re.search(pattern, name) for name in names]
        if None in matches:
            raise ValueError(
                f"{images[matches.index(None)]} does not fit the regular expression "
                f"data.groups={pattern}, searched in {names[matches.index(None)]}: correct it"
            )
        groups = ["/".join(map(str, m.groups())) or m[0] for m in matches if m]
        found = f"{len(set(groups))} groups of {len(names)} images by data.groups"
    else:
        one_sided = [_SIDE.sub("*", name) for name in names]
        shared = Counter(one_sided)
        groups = [
            plain if shared[plain] > 1 else name
            for plain, name in zip(one_sided, names, strict=True)
        ]
        found = f"{sum(count > 1 for count in shared.values())} groups that differ only in a side"
    return [f"{domain}/{group}" for group in groups], f"{domain}: {found}"
