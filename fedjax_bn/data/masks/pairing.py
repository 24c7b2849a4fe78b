"""Finds the mask of every image in a domain's folder, and the images that belong together.

Images are the image files in folders named `images`, masks those in folders named `masks` (or
another name of `IMAGES` and `MASKS`), with or without folders named train, val and test around or
in them; other folders, such as `fov` for the field of view, are left out. A domain without a folder
of masks has its images and masks in one folder, where the text before and after has a letter.

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
from collections.abc import Iterator, Sequence
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
_REMEDY = (
    "correct the files, or set data.pairs to patterns such as images/{}.png,masks/{}_mask.png; "
    "data.domains chooses among folders"
)

# A file's folders, without those named in IMAGES and MASKS, and its stem; or what {} matches.
_Key = tuple[str, ...]
_Found = tuple[dict[_Key, Path], dict[_Key, Path], str]  # images, masks with equal keys, the rule


class _Rule(NamedTuple):
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


class Paired(NamedTuple):
    """The images of a domain and their masks, N files each, the rule in words, and other files."""

    images: list[Path]
    masks: list[Path]
    rule: str
    others: list[Path]


def find_pairs(
    files: Sequence[Path], folder: Path, patterns: Sequence[str] = (), remedy: str = _REMEDY
) -> Paired:
    """Pairs the images and masks of a domain by the rule above, or by patterns.

    Args:
      files: images, or volumes of NIfTI, in the folder.
      folder: of the domain.
      patterns: an image's, a mask's, an image's, ...; empty for the rule.
      remedy: what to do if files do not suit each other, the end of error messages.

    Raises:
      ValueError: an image has no mask or more than one, a mask has no image, or there are only
        images.
    """
    images, masks, rule = (
        _by_patterns(files, folder, patterns) if patterns else _by_names(files, folder, remedy)
    )
    for own, others, what, lacks in (
        (images, masks, "image", "mask"),
        (masks, images, "mask", "image"),
    ):
        if alone := [file for key, file in own.items() if key not in others]:
            names = first_few([file.relative_to(folder).as_posix() for file in alone], 3)
            raise ValueError(
                f"{len(alone)} {what}s in {folder} have no {lacks}, such as {names}, where {rule}: "
                f"{remedy}"
            )
    used = {*images.values(), *masks.values()}
    others = [file for file in files if file not in used]
    return Paired(list(images.values()), [masks[key] for key in images], rule, others)


def _by_names(files: Sequence[Path], folder: Path, remedy: str) -> _Found:
    """Returns images and masks by the rule, each image by the key that its mask must have."""
    images, masks = _by_folders(files, folder)
    rule = _best(list(images), list(masks or images), one_folder=not masks)
    if rule is None:
        what = f"{len(images)} images and {len(masks)} masks that are not named alike"
        raise ValueError(f"{folder} has {what if images else 'no images with masks'}: {remedy}")
    named = {key: rule.mask_of(key[-1]) for key in images}
    wanted = {(*key[:-1], name) if name else (*key, ""): key for key, name in named.items()}
    if not masks:
        masks = {key: images[key] for key in wanted if key in images}
        wanted = {key: own for key, own in wanted.items() if own not in masks}
    text = f"the mask of {rule.head}*{rule.tail} is {rule.before}*{rule.after}"
    return {key: images[own] for key, own in wanted.items()}, masks, text


def _by_folders(files: Sequence[Path], folder: Path) -> tuple[dict[_Key, Path], dict[_Key, Path]]:
    """Returns the images and the masks of a domain's files, by their folders.

    Without a folder of images, images are the files that are in no folder but those of parts.
    """
    found: dict[str, dict[_Key, Path]] = {"image": {}, "mask": {}, "": {}}
    twins, mask_folders = [], {}
    for file in files:
        above = file.relative_to(folder).parts[:-1]
        named = [name for name in above if name.lower() in (*IMAGES, *MASKS)]
        plain = [name for name in above if name not in named]
        role = "" if not named else "image" if named[-1].lower() in IMAGES else "mask"
        if role == "mask":
            mask_folders[named[-1].lower()] = named[-1]
        if named or all(part_of([name]) is not None for name in plain):
            twin = found[role].setdefault((*plain, _stem(file)), file)
            twins += [(role, twin, file)] * (twin is not file)
    if len(mask_folders) > 1:
        raise ValueError(
            f"{folder} has several folders of masks, {first_few(sorted(mask_folders.values()))}: "
            "choose one by data.pairs, such as images/{}.png,"
            f"{min(mask_folders.values())}/{{}}.png"
        )
    for role, twin, file in twins:
        if role or not found["image"]:
            raise ValueError(
                f"{twin} and {file} have one name, but an image needs one mask: remove one of "
                "them, or choose by data.pairs"
            )
    return found["image"] or found[""], found["mask"]


def _stem(file: Path) -> str:
    return file.name[: -len(".nii.gz")] if file.name.lower().endswith(".nii.gz") else file.stem


def _best(images: Sequence[_Key], masks: Sequence[_Key], one_folder: bool) -> _Rule | None:
    """Returns the rule that pairs most images with masks, of equals the one with fewest letters."""
    proposed: Counter[_Rule] = Counter()
    for image in images[:: max(1, len(images) // _SAMPLED)]:
        for mask in masks:
            if mask[:-1] == image[:-1]:
                proposed.update(set(_proposals(image[-1], mask[-1], one_folder)))
    known, best = set(masks), (0, 0, None)
    for rule, _ in proposed.most_common(_PROPOSALS):
        count = sum((*key[:-1], rule.mask_of(key[-1])) in known for key in images)
        best = max(best, (count, -sum(map(len, rule)), rule), key=lambda one: one[:2])
    return best[2]


def _proposals(image: str, mask: str, one_folder: bool) -> Iterator[_Rule]:
    """Yields the rules by which a mask may be an image's.

    In one folder a mask adds a letter at least to the name of its image: otherwise either may be
    the mask, and 10 that of 1.
    """
    if image in mask:
        before, _, after = mask.partition(image)
        if not one_folder or any(map(str.isalpha, before + after)):
            yield _Rule(before=before, after=after)
    if one_folder:
        return
    if start := _shared(image, mask):
        yield _Rule(tail=image[start:], after=mask[start:])
    if end := _shared(image[::-1], mask[::-1]):
        yield _Rule(head=image[:-end], before=mask[:-end])


def _shared(one: str, other: str) -> int:
    """Returns how many letters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))


def _by_patterns(files: Sequence[Path], folder: Path, patterns: Sequence[str]) -> _Found:
    """Returns images and masks by the first two patterns that fit both, by what {} matches."""
    for pair in zip(patterns[::2], patterns[1::2], strict=True):
        images, masks = (_matched(files, folder, pattern) for pattern in pair)
        if images and masks:
            return images, masks, f"{pair[0]} has the mask {pair[1]}"
    raise ValueError(
        f"{folder} has no image and mask of the patterns {first_few(patterns)} of data.pairs, "
        "which are relative to the folder of a domain: correct them"
    )


def _matched(files: Sequence[Path], folder: Path, pattern: str) -> dict[_Key, Path]:
    """Returns the files that a pattern fits, by what its {} matches."""
    text = re.escape(pattern).replace(r"\{\}", "([^/]+)").replace(r"\*", "[^/]*")
    found: dict[_Key, Path] = {}
    for file in files:
        if match := re.fullmatch(text, file.relative_to(folder).as_posix()):
            twin = found.setdefault((match[1],), file)
            if twin is not file:
                raise ValueError(
                    f"{twin} and {file} both fit {pattern} of data.pairs with {match[1]}: make the "
                    "pattern stricter, or remove one of them"
                )
    return found


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
        in a side (L and R, left and right, OD and OS) are one group, in any part (train, val,
        test), and each other image is alone.

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
        note = f"{len(set(groups))} groups of {len(names)} images by data.groups"
    else:
        sideless = list(map(_sideless, names))
        shared = Counter(sideless)
        groups = [
            one if shared[one] > 1 else name for one, name in zip(sideless, names, strict=True)
        ]
        note = f"{sum(count > 1 for count in shared.values())} groups that differ only in a side"
    return [f"{domain}/{group}" for group in groups], f"{domain}: {note}"


def _sideless(name: str) -> str:
    """Returns the name of an image with * for sides, without parts and suffix; or as it is."""
    if not _SIDE.search(name):
        return name
    kept = [one for one in Path(name).with_suffix("").parts if part_of([one]) is None]
    return _SIDE.sub("*", "/".join(kept))
