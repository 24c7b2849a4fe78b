"""Any dataset of images and labels that tensorflow-datasets has prepared, without TensorFlow.

    data.domains=domainnet/clipart,domainnet/sketch     a domain is NAME or NAME/CONFIG there

Only copies in the format array_record can be read without TensorFlow (`as_data_source`):
`tfds build NAME --file_format=array_record` prepares one, on any machine that has TensorFlow. The
splits train, validation and test are a domain's official parts.
"""

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.pixels.decode import UPRIGHT, decode_image, orientation_notes
from fedjax_bn.data.seeds import hash_of
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.source import PARTS, Pool, Source, check_source, numbered_names, parts_of
from fedjax_bn.data.threads import in_threads
from fedjax_bn.engine.inputs import class_labels


def load_tfds(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    cache: Path | None = None,
    progress: bool = True,
    orientation: str = UPRIGHT,
) -> Source:
    """Returns prepared datasets as u8[N, image_size, image_size, 3], one pool each.

    They are normalized by (0.5, 0.5), and samples are named DOMAIN/SPLIT/NUMBER.
    `path` is the `data_dir`, None for $TFDS_DATA_DIR, or else ~/tensorflow_datasets. `domains` are
    NAME or NAME/CONFIG; a domain is called CONFIG, or NAME without one. `classes` are by default
    those of the first domain.
    """
    if not domains:
        raise ValueError("tfds needs data.domains: NAME or NAME/CONFIG of prepared datasets")
    folder = Path(path or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    builders = {name: _open_copy(folder, name) for name in domains}
    classes = tuple(classes) or tuple(builders[domains[0]].info.features["label"].names)
    pools, notes = [], []

    def make(name: str, records: Sequence[tuple[Any, int]], write: Write) -> tuple[str, ...]:
        def convert(k: int) -> int:
            source, row = records[k]
            image, tag = decode_image(source[row]["image"], image_size, orientation=orientation)
            write(image[None], k)  # threads finish in any order, so each gives its place
            return tag

        tags = list(in_threads(convert, range(len(records)), f"reading {name}", progress))
        return orientation_notes(tags, orientation)

    for name, builder in builders.items():
        records, labels, sample_names, counts = _read_labels(name, builder, classes)
        sizes = [builder.info.splits[split].num_bytes for split in counts]
        state = hash_of(str(builder.info.version), labels, sizes, classes)
        file = f"tfds-{name.replace('/', '-')}-{image_size}-{orientation}-{state}"
        shape = (len(labels), image_size, image_size, 3)
        images, converted = cached_array(cache, file, shape, partial(make, name, records))
        parts = parts_of(counts) if len(counts.keys() & PARTS.keys()) > 1 else None
        pools.append(Pool(name.rpartition("/")[2], images, labels, sample_names, parts))
        notes += [f"{pools[-1].name}: {note}" for note in converted]
    key = hash_of(*(part for pool in pools for part in (pool.labels, pool.names)))
    half = (0.5,) * 3
    return check_source(Source("tfds", classes, tuple(pools), half, half, tuple(notes), key=key))


def _open_copy(folder: Path, name: str) -> Any:
    """Returns the read-only builder of the newest version of NAME[/CONFIG] in a `data_dir`."""
    import tensorflow_datasets as tfds

    command = f"tfds build {name} --file_format=array_record"
    versions = [info.parent for info in (folder / name).glob("[0-9]*.*.*/dataset_info.json")]
    if not versions:
        raise FileNotFoundError(f"{folder / name} has no prepared copy; prepare one: {command}")
    newest = max(versions, key=lambda version: tuple(map(int, version.name.split("."))))
    features = newest / "features.json"
    with corruption_named(features):
        named_code = set(_code_in(json.loads(features.read_text("utf-8"))))
    # tensorflow-datasets imports any module that a copy names.
    if foreign := sorted(c for c in named_code if not c.startswith("tensorflow_datasets.")):
        raise ValueError(f"{features} names the code {foreign[0]!r}, which is never imported")
    builder = tfds.builder_from_directory(newest)
    formats = [form.value for form in builder.info.available_file_formats()]
    columns = dict(builder.info.features)
    if "array_record" not in formats or not hasattr(columns.get("label"), "names"):
        form = f"{', '.join(formats)} of {', '.join(columns)}"
        raise ValueError(f"{newest} is {form}; it needs an image and a class label: {command}")
    return builder


def _code_in(content: Any) -> Iterator[str]:
    """Yields the names of Python classes in a features.json, in its present or old form."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if key in ("type", "pythonClassName", "python_class_name"):
            yield str(value)
        elif isinstance(value, dict | list):
            yield from _code_in(value)


def _read_labels(
    name: str, builder: Any, classes: Sequence[str]
) -> tuple[list[tuple[Any, int]], np.ndarray, np.ndarray, dict[str, int]]:
    """Returns source and row of the classes' samples, their labels and names, and split -> size."""
    import tensorflow_datasets as tfds

    class_names = builder.info.features["label"].names
    if unknown := [label for label in classes if label not in class_names]:
        raise ValueError(f"{name} has no class {unknown[0]!r}; it has {', '.join(class_names)}")
    position = np.full(len(class_names), -1, np.int32)
    position[[class_names.index(label) for label in classes]] = np.arange(len(classes))
    official = [split for split in PARTS if split in builder.info.splits]
    # Configs of CIFAR-10-C show the same photographs in one order, so a photograph has one name in
    # all of them, and no split separates its copies.
    origin = "test" if name.startswith("cifar10_corrupted/") else name.rpartition("/")[2]
    records, counts, labels, names = [], {}, [], []
    for split in official or builder.info.splits:
        source = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
        # Labels are stored only beside the images.
        stored = np.array([record["label"] for record in source])
        of_split = position[class_labels(stored, f"{builder.data_dir}, {split},", len(class_names))]
        rows = np.flatnonzero(of_split >= 0)
        records += [(source, row) for row in rows.tolist()]
        counts[split] = len(rows)
        labels.append(of_split[rows])
        names.append(numbered_names(origin, {split: len(of_split)})[rows])
    return records, np.concatenate(labels), np.concatenate(names), counts
