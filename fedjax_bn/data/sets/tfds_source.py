"""Datasets that tensorflow-datasets has prepared, read without TensorFlow.

    name         domains                                 builder of tensorflow-datasets
    digits       mnist, svhn                             mnist, svhn_cropped
    cifar10      cifar10                                 cifar10
    cifar10_c    the 19 corruptions                      cifar10_corrupted/CORRUPTION_SEVERITY
    domainnet    clipart, infograph, ... (six)           domainnet/DOMAIN
    pacs, vlcs, officehome, office_caltech10             ours, see fedjax_bn/tfds

Only copies in the format array_record can be read without TensorFlow (`as_data_source`). What is
not prepared yet is prepared, if there is a connection, in a process of its own: the builders of
MNIST, SVHN, CIFAR-10, CIFAR-10-C and DomainNet use TensorFlow to write their images, so it must be
installed for that once, there or on another machine; this process never imports it. Ours are
prepared without TensorFlow.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.corruptions import CORRUPTIONS, groups_of
from fedjax_bn.data.hashes import hash_of
from fedjax_bn.data.messages import progress_bar
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.pixels.decode import decode_image
from fedjax_bn.data.pixels.raster import MEGAPIXELS, UPRIGHT, orientation_notes
from fedjax_bn.data.pools import PARTS
from fedjax_bn.data.sets import cifar10, domainnet
from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS
from fedjax_bn.data.sets.tfds_copy import open_copy
from fedjax_bn.data.source import Pool, Source, check_source
from fedjax_bn.engine.inputs import class_labels

_OURS = {name: IMAGE_FOLDERS[name] for name in ("pacs", "vlcs", "officehome", "office_caltech10")}
NAMES = ("digits", "cifar10", "cifar10_c", "domainnet", *_OURS)
# where tensorflow-datasets has names of its own
_CORRUPTED = {"glass_blur": "frosted_glass_blur", "elastic_transform": "elastic"}
_BLOCK = 256  # images read and decoded at a time


class _Copy(NamedTuple):
    """A prepared dataset that is a domain, or some splits of one that are.

    domain: its name.
    builder: NAME or NAME/CONFIG of tensorflow-datasets.
    splits: which belong to the domain, in order; an empty tuple for train and test, if there.
    """

    domain: str
    builder: str
    splits: tuple[str, ...] = ()


def load(
    path: str | Path | None,
    name: str,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    download: bool = True,
    **how: Any,
) -> Source:
    """A dataset from tensorflow-datasets as u8[N, image_size, image_size, 3].

    Args:
      path: its `data_dir`; None for the one that TFDS_DATA_DIR names, or ~/tensorflow_datasets.
      name: one of `NAMES`; "cifar10_c/3" for another severity than 1, in 1..5.
      image_size: pixels a side; images are stretched to it by Pillow's bilinear filter.
      domains: which ones, in that order; empty for all.
      classes: which ones, in that order, as in FedBN's ten of DomainNet; empty for all.
      download: prepare what is not there. Ours cannot be fetched: see fedjax_bn/tfds.
      **how: `cache`, `progress`, `max_megapixels` and `orientation` of `pixels.decode.decode`.

    Returns:
      Source; splits train, validation and test are the official parts. Samples are named by
      their `name`, DOMAIN/`id`, or DOMAIN/SPLIT/NUMBER in the order of the copy. Photographs of
      CIFAR-10-C have one name in all domains, such as "test/00017".

    Raises:
      ModuleNotFoundError: tensorflow-datasets is not installed.
      FileNotFoundError: there is no prepared copy, and none could be made.
      ValueError: an argument is unknown, or a copy is not in the format array_record.
    """
    given, (name, _, severity) = name, name.partition("/")
    if name not in NAMES or (severity and name != "cifar10_c"):
        raise ValueError(f"{given!r} is no dataset here; choose from {', '.join(NAMES)}")
    folder = Path(path or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    opened = {}
    for copy in _copies_of(name, domains, severity or "1"):
        told = _how_to_prepare(copy.builder)
        opened[copy] = open_copy(folder, copy.builder, told, download and name not in _OURS)
    known = tuple(next(iter(opened.values())).info.features["label"].names)
    classes = tuple(classes) or known
    unknown = [one for one in classes if one not in known]
    if unknown:
        raise ValueError(f"{name} has no classes {unknown}; it has {', '.join(known)}")
    chosen = np.array([known.index(one) for one in classes])
    reading = _Reading(image_size, **how)
    read = [_pool(copy, builder, chosen, reading) for copy, builder in opened.items()]
    pools, notes = (tuple(column) for column in zip(*read, strict=True))
    if name == "cifar10_c":
        pools = _same_photographs(pools)
    mean, std = _constants(name)
    groups = groups_of([pool.name for pool in pools]) if name == "cifar10_c" else {}
    key = hash_of(*(part for pool in pools for part in (pool.labels, pool.names)))
    notes = tuple(f"{pool.name}: {n}" for pool, own in zip(pools, notes, strict=True) for n in own)
    return check_source(Source(name, classes, pools, mean, std, notes, groups, key))


def _copies_of(name: str, domains: Sequence[str], severity: str) -> list[_Copy]:
    """The copies that make up a dataset.

    Raises:
      ValueError: a domain or the severity is unknown.
    """
    if name == "digits":
        copies = [_Copy("mnist", "mnist"), _Copy("svhn", "svhn_cropped", ("train", "test"))]
    elif name == "cifar10":
        copies = [_Copy("cifar10", "cifar10")]
    elif name == "cifar10_c":
        if severity not in tuple("12345"):
            raise ValueError(f"severity is {severity}; it must be in 1..5")
        copies = [
            _Copy(one, f"cifar10_corrupted/{_CORRUPTED.get(one, one)}_{severity}", ("test",))
            for one in CORRUPTIONS
        ]
    elif name == "domainnet":
        copies = [_Copy(domain, f"domainnet/{domain}") for domain in domainnet.DOMAINNET.domains]
    else:
        copies = [_Copy(one, name, (one.replace(" ", "_"),)) for one in _OURS[name].domains]
    by_domain = {copy.domain: copy for copy in copies}
    unknown = [domain for domain in domains if domain not in by_domain]
    if unknown:
        raise ValueError(f"{name} has no domains {unknown}; it has {', '.join(by_domain)}")
    return [by_domain[domain] for domain in domains or by_domain]


def _constants(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation by which a dataset's images are normalized."""
    if name == "digits":
        return (0.5,) * 3, (0.5,) * 3
    if name.startswith("cifar10"):
        return cifar10.MEAN, cifar10.STD
    published = {"domainnet": domainnet.DOMAINNET, **_OURS}[name]
    return published.mean, published.std


def _how_to_prepare(name: str) -> str:
    """The command that makes a prepared copy, to end a sentence with."""
    if name in _OURS:
        return (
            f"prepare it from its images: python -m fedjax_bn.tfds {name} FOLDER_OF_THE_IMAGES "
            "--data_dir=DIR"
        )
    return f"tfds build {name} --file_format=array_record (needs TensorFlow and a connection)"


class _Reading(NamedTuple):
    """How images are read, see `load`."""

    size: int
    cache: Path | None = None
    progress: bool = True
    max_megapixels: float = MEGAPIXELS
    orientation: str = UPRIGHT


def _pool(
    copy: _Copy, builder: Any, chosen: np.ndarray, how: _Reading
) -> tuple[Pool, tuple[str, ...]]:
    """The samples of the chosen classes, whose labels become positions in `chosen`, and notes."""
    import tensorflow_datasets as tfds

    skip = {"image": tfds.decode.SkipDecoding()}
    there = builder.info.splits
    split_names = copy.splits or tuple(name for name in PARTS if name in there)
    sources = [builder.as_data_source(name, decoders=skip) for name in split_names]
    tables = [
        _table(copy, name, source, builder)
        for name, source in zip(split_names, sources, strict=True)
    ]
    kept = [np.flatnonzero(np.isin(table.labels, chosen)) for table in tables]
    shape = (sum(map(len, kept)), how.size, how.size, 3)

    def make(write: Write) -> tuple[str, ...]:
        tagged = 0
        with progress_bar(shape[0], f"reading {copy.domain}", how.progress) as shown:
            for source, rows in zip(sources, kept, strict=True):
                for first in range(0, len(rows), _BLOCK):
                    block = rows[first : first + _BLOCK]
                    images, tags = _decode(source, block, how)
                    write(images)
                    tagged += sum(tag != 1 for tag in tags)
                    shown.update(len(block))
        return orientation_notes(tagged, how.orientation)

    labels = np.concatenate([t.labels[rows] for t, rows in zip(tables, kept, strict=True)])
    state = hash_of(
        str(builder.info.version), labels, *(there[name].num_bytes for name in split_names)
    )
    file = (
        f"tfds-{copy.builder.replace('/', '-')}-{copy.domain}-{how.size}-{how.orientation}-{state}"
    )
    position = np.full(chosen.max() + 1, -1, np.int32)
    position[chosen] = np.arange(len(chosen), dtype=np.int32)
    names, parts = (
        np.concatenate([table[column][rows] for table, rows in zip(tables, kept, strict=True)])
        for column in (1, 2)
    )
    images, notes = cached_array(how.cache, file, shape, make)
    divided = None if (parts < 0).any() else parts
    return Pool(copy.domain, images, position[labels], names, divided), notes


class _Table(NamedTuple):
    """What a split says of its samples beside their images: labels i32[N], names, parts i8[N]."""

    labels: np.ndarray
    names: np.ndarray
    parts: np.ndarray


def _table(copy: _Copy, split: str, source: Sequence[dict[str, Any]], builder: Any) -> _Table:
    """Read record by record: tensorflow-datasets has no labels apart from the images."""
    labels, names, parts = [], [], []
    for number, record in enumerate(source):
        labels.append(record["label"])
        if "name" in record:
            names.append(record["name"].decode())
        else:
            own = record["id"].decode() if "id" in record else f"{split}/{number:05}"
            names.append(f"{copy.domain}/{own}")
        parts.append(int(record.get("part", PARTS.get(split, 0))))
    place, known = f"{builder.data_dir}, {split},", builder.info.features["label"].num_classes
    return _Table(
        class_labels(np.array(labels), place, known), np.array(names), np.array(parts, np.int8)
    )


def _decode(source: Any, rows: np.ndarray, how: _Reading) -> tuple[np.ndarray, list[int]]:
    """Images u8[n, size, size, 3] of these rows, and their tags of EXIF.

    Threads decode, since Pillow works unlocked.
    """
    records = source.__getitems__(rows.tolist())
    with ThreadPoolExecutor() as threads:
        decoded = threads.map(
            lambda r: decode_image(
                r["image"], how.size, how.max_megapixels, orientation=how.orientation
            ),
            records,
        )
        images, _, tags = zip(*decoded, strict=True)
    return np.stack(images), list(tags)


def _same_photographs(pools: tuple[Pool, ...]) -> tuple[Pool, ...]:
    """Gives the photographs of CIFAR-10-C one name in all domains.

    tensorflow-datasets orders every copy by a hash of the number of the photograph, so they agree.

    Raises:
      ValueError: labels tell that they do not.
    """
    first = pools[0]
    names = cifar10.sample_names("test", len(first.labels))
    for pool in pools:
        if not np.array_equal(pool.labels, first.labels):
            raise ValueError(
                f"{pool.name!r} and {first.name!r} of CIFAR-10-C have other photographs or another "
                "order; prepare both again with one version of tensorflow-datasets"
            )
    return tuple(pool._replace(names=names, parts=None) for pool in pools)
