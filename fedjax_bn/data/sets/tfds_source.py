"""Datasets that tensorflow-datasets has prepared, read without TensorFlow.

    name         domains                                 builder of tensorflow-datasets
    digits       mnist, svhn                             mnist, svhn_cropped
    cifar10      cifar10                                 cifar10
    cifar10_c    the 19 corruptions                      cifar10_corrupted/CORRUPTION_SEVERITY
    domainnet    clipart, infograph, ... (six)           domainnet/DOMAIN
    pacs, vlcs, officehome, office_caltech10             ours, see fedjax_bn/tfds

Only copies in the format array_record can be read without TensorFlow (`as_data_source`). A missing
copy is prepared in another process, if there is a connection. The builders of MNIST, SVHN,
CIFAR-10, CIFAR-10-C and DomainNet use TensorFlow to write their images, so TensorFlow must be
installed for this one step, here or on another machine; this process never imports it. Our builders
need no TensorFlow.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.arguments.text import short
from fedjax_bn.data.corruptions import CORRUPTIONS, groups_of
from fedjax_bn.data.messages import progress_bar
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.pixels.decode import decode_image
from fedjax_bn.data.pixels.raster import MEGAPIXELS, UPRIGHT, orientation_notes
from fedjax_bn.data.regular_files import read_regular
from fedjax_bn.data.seeds import hash_of
from fedjax_bn.data.sets import cifar10_c, domainnet
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS
from fedjax_bn.data.source import PARTS, Pool, Source, check_source, numbered_names
from fedjax_bn.engine.inputs import class_labels

_OURS = {name: IMAGE_FOLDERS[name] for name in ("pacs", "vlcs", "officehome", "office_caltech10")}
NAMES = ("digits", "cifar10", "cifar10_c", "domainnet", *_OURS)
# names that differ in tensorflow-datasets
_CORRUPTED = {"glass_blur": "frosted_glass_blur", "elastic_transform": "elastic"}
_BLOCK = 256  # images read and decoded at a time
_PREPARE = """
import sys, tensorflow_datasets as tfds
tfds.builder(sys.argv[1], data_dir=sys.argv[2], file_format="array_record").download_and_prepare()
"""


class _Copy(NamedTuple):
    """A prepared dataset, or some splits of it, that make up a domain.

    domain: its name.
    builder: NAME or NAME/CONFIG of tensorflow-datasets.
    splits: those of the domain, in order; empty for train, validation and test, if there.
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
    """Returns a dataset from tensorflow-datasets as u8[N, image_size, image_size, 3].

    Args:
      path: its `data_dir`; None for $TFDS_DATA_DIR, or else ~/tensorflow_datasets.
      name: one of `NAMES`; "cifar10_c/3" for another severity than 1, in 1..5.
      image_size: pixels a side; images are stretched to it by Pillow's bilinear filter.
      domains: names, in that order; empty for all.
      classes: names, in that order, such as FedBN's ten of DomainNet; empty for all.
      download: prepare missing copies, except ours, which cannot be fetched: see fedjax_bn/tfds.
      **how: `cache`, `progress`, `max_megapixels` and `orientation` of `pixels.decode.decode`.

    Returns:
      Source; splits train, validation and test are the official parts. Samples are named by
      their `name`, DOMAIN/`id`, or DOMAIN/SPLIT/NUMBER in the order of the copy. Photographs of
      CIFAR-10-C have one name in all domains, such as "test/00017".
    """
    given, (name, _, severity) = name, name.partition("/")
    if name not in NAMES or (severity and name != "cifar10_c"):
        raise ValueError(f"{given!r} is not a dataset here; choose from {', '.join(NAMES)}")
    folder = Path(path or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    copies = _copies_of(name, domains, severity or "1")
    opened = {copy: _open_copy(folder, copy.builder, download) for copy in copies}
    known = tuple(next(iter(opened.values())).info.features["label"].names)
    classes = tuple(classes) or known
    if unknown := [one for one in classes if one not in known]:
        raise ValueError(f"{name} has no classes {unknown}; it has {', '.join(known)}")
    chosen = np.array([known.index(one) for one in classes])
    pools, notes = [], []
    for copy, builder in opened.items():
        pool, own = _pool(copy, builder, chosen, image_size, **how)
        pools.append(pool)
        notes += [f"{pool.name}: {note}" for note in own]
    groups: dict[str, tuple[str, ...]] = {}
    if name == "cifar10_c":
        # Every copy is ordered by a hash of the photograph's number, so the copies have one order,
        # and a photograph can have one name in all domains.
        first = pools[0]
        for pool in pools:
            if not np.array_equal(pool.labels, first.labels):
                raise ValueError(
                    f"{pool.name!r} and {first.name!r} of CIFAR-10-C have other photographs or "
                    "another order; prepare both again with one version of tensorflow-datasets"
                )
        names = numbered_names("test", {"": len(first.labels)})
        pools = [pool._replace(names=names, parts=None) for pool in pools]
        groups = groups_of([pool.name for pool in pools])
    mean = std = (0.5,) * 3
    if name.startswith("cifar10"):
        mean, std = cifar10_c.MEAN, cifar10_c.STD
    elif name != "digits":
        published = {"domainnet": domainnet.DOMAINNET, **_OURS}[name]
        mean, std = published.mean, published.std
    key = hash_of(*(part for pool in pools for part in (pool.labels, pool.names)))
    return check_source(Source(name, classes, tuple(pools), mean, std, tuple(notes), groups, key))


def _copies_of(name: str, domains: Sequence[str], severity: str) -> list[_Copy]:
    """Returns the copies that make up a dataset; ValueError: a domain or severity is unknown."""
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
    if unknown := [domain for domain in domains if domain not in by_domain]:
        raise ValueError(f"{name} has no domains {unknown}; it has {', '.join(by_domain)}")
    return [by_domain[domain] for domain in domains or by_domain]


def _open_copy(folder: Path, name: str, download: bool) -> Any:
    """Returns the read-only builder of the newest version of NAME[/CONFIG] in a `data_dir`.

    Prepares a missing copy if `download` and it is not ours. Errors are those of `load`.
    """
    try:
        import tensorflow_datasets as tfds
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {name} of tensorflow-datasets needs {error.name}; install fedjax_bn with its "
            "data extra (pip install tensorflow-datasets importlib_resources array_record)"
        ) from error
    how = f"tfds build {name} --file_format=array_record (needs TensorFlow and a connection)"
    if name in _OURS:
        how = (
            f"prepare it from its images: python -m fedjax_bn.tfds {name} FOLDER_OF_THE_IMAGES "
            "--data_dir=DIR"
        )

    def versions() -> list[Path]:
        ready = [info.parent for info in (folder / name).glob("*.*.*/dataset_info.json")]
        ready = [version for version in ready if version.name.replace(".", "").isdecimal()]
        return sorted(ready, key=lambda version: tuple(map(int, version.name.split("."))))

    if not versions():
        if name in _OURS or not download:
            raise FileNotFoundError(f"{folder / name} has no prepared copy; {how}")
        # in another process, because the builders import TensorFlow
        command = [sys.executable, "-c", _PREPARE, name, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise FileNotFoundError(
                f"{folder / name} has no prepared copy, and making one failed "
                f"({lines[-1] if lines else done.returncode}); prepare it elsewhere and bring it "
                f"here: {how}"
            )
    newest = versions()[-1]
    features = newest / "features.json"
    with corruption_named(features):
        named = set(_code_in(json.loads(read_regular(features, 2**26))))
        # tensorflow-datasets imports any module that a copy names
        if foreign := sorted(one for one in named if not one.startswith("tensorflow_datasets.")):
            raise ValueError(
                f"it names the code {short(foreign[0])!r}, which is not imported: take a copy "
                "that has features of tensorflow-datasets alone"
            )
    builder = tfds.builder_from_directory(newest)
    formats = sorted(form.value for form in builder.info.available_file_formats())
    if "array_record" not in formats:
        raise ValueError(
            f"{builder.data_dir} is in the format {', '.join(formats)}, which takes TensorFlow to "
            f"read; move it away and prepare it again: {how}"
        )
    return builder


def _code_in(content: Any) -> Iterator[str]:
    """Yields the names of Python classes in a features.json, in its present or old form."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if key in ("type", "pythonClassName", "python_class_name"):
            yield str(value)
        elif isinstance(value, dict | list):
            yield from _code_in(value)


def _pool(
    copy: _Copy,
    builder: Any,
    chosen: np.ndarray,
    size: int,
    *,
    cache: Path | None = None,
    progress: bool = True,
    max_megapixels: float = MEGAPIXELS,
    orientation: str = UPRIGHT,
) -> tuple[Pool, tuple[str, ...]]:
    """Returns the samples of the chosen classes, labelled by positions in `chosen`, and notes."""
    import tensorflow_datasets as tfds

    skip = {"image": tfds.decode.SkipDecoding()}
    there = builder.info.splits
    splits = copy.splits or tuple(name for name in PARTS if name in there)
    sources = [builder.as_data_source(name, decoders=skip) for name in splits]
    tables = [_table(copy, *one, builder) for one in zip(splits, sources, strict=True)]
    kept = [np.flatnonzero(np.isin(table[0], chosen)) for table in tables]
    labels, names, parts = (
        np.concatenate([table[column][rows] for table, rows in zip(tables, kept, strict=True)])
        for column in range(3)
    )
    shape = (len(labels), size, size, 3)

    def decoded(record: dict[str, Any]) -> tuple[np.ndarray, str, int]:
        return decode_image(record["image"], size, max_megapixels, orientation=orientation)

    def make(write: Write) -> tuple[str, ...]:
        tagged = 0
        # threads, because Pillow releases Python's lock
        with (
            progress_bar(shape[0], f"reading {copy.domain}", progress) as shown,
            ThreadPoolExecutor() as threads,
        ):
            for source, rows in zip(sources, kept, strict=True):
                for first in range(0, len(rows), _BLOCK):
                    records = source.__getitems__(rows[first : first + _BLOCK].tolist())
                    images, _, tags = zip(*threads.map(decoded, records), strict=True)
                    write(np.stack(images))
                    tagged += sum(tag != 1 for tag in tags)
                    shown.update(len(images))
        return orientation_notes(tagged, orientation)

    state = hash_of(str(builder.info.version), labels, *(there[name].num_bytes for name in splits))
    file = f"tfds-{copy.builder.replace('/', '-')}-{copy.domain}-{size}-{orientation}-{state}"
    images, notes = cached_array(cache, file, shape, make)
    position = np.full(chosen.max() + 1, -1, np.int32)
    position[chosen] = np.arange(len(chosen), dtype=np.int32)
    divided = None if (parts < 0).any() else parts
    return Pool(copy.domain, images, position[labels], names, divided), notes


def _table(
    copy: _Copy, split: str, source: Sequence[dict[str, Any]], builder: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns labels i32[N], names and parts i8[N] of a split."""
    labels, names, parts = [], [], []
    for number, record in enumerate(source):  # labels are stored only with the images
        labels.append(record["label"])
        if "name" in record:
            names.append(record["name"].decode())
        else:
            own = record["id"].decode() if "id" in record else f"{split}/{number:05}"
            names.append(f"{copy.domain}/{own}")
        parts.append(int(record.get("part", PARTS.get(split, 0))))
    place, known = f"{builder.data_dir}, {split},", builder.info.features["label"].num_classes
    numbers = class_labels(np.array(labels), place, known)
    return numbers, np.array(names), np.array(parts, np.int8)
