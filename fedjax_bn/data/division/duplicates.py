"""Finds tested samples that are byte for byte training samples."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Rows, Split, blocks, select, whole
from fedjax_bn.data.messages import first_few


def duplicate_notes(dataset: Dataset, unseen: Sequence[Domain] = ()) -> tuple[str, ...]:
    """Returns a note with the number of tested samples that are some client's training samples.

    Labels and names are not compared. Clients that share their test samples are one place. The
    note is left out if there are no such samples.
    """
    # Every image is looked at in its middle row; only those that agree there are read whole.
    trained = defaultdict(list)  # hash of the middle row -> places of training samples
    for client in dataset.domains:
        for row, code in enumerate(_codes(_middle_rows(client.train))):
            trained[code].append((client, row))
    tests = {id(domain.test): (domain.name, domain.test) for domain in dataset.domains}
    tested = dict([*tests.values(), *((domain.name, whole(domain)) for domain in unseen)])
    alike = {}  # name -> the tested samples that may be copies
    for name, split in tested.items():
        codes = _codes(_middle_rows(split))
        alike[name] = [(row, code) for row, code in enumerate(codes) if code in trained]
    suspects = defaultdict(list)
    for code in {code for rows in alike.values() for _, code in rows}:
        for client, row in trained[code]:
            suspects[client.name].append(row)
    owners: dict[int, str] = {}  # hash of a whole image -> the client that trains on it
    for client in dataset.domains:
        if rows := suspects[client.name]:
            for code in _codes(blocks(select(client.train, np.array(rows)).images)):
                owners.setdefault(code, client.name)
    counts = []
    for name, split in tested.items():
        if rows := [row for row, _ in alike[name]]:
            codes = _codes(blocks(select(split, np.array(rows)).images))
            copies = Counter(owners[code] for code in codes if code in owners)
            if copies:
                client, _ = copies.most_common(1)[0]
                total, size = copies.total(), len(split.images)
                counts.append(f"{total} of the {size} of {name} (most in {client})")
    if not counts:
        return ()
    return (
        "tested samples that are byte for byte training samples too, so that their scores are not "
        f"those of new samples: {first_few(counts)}; remove the copies",
    )


def _middle_rows(split: Split) -> Iterator[np.ndarray]:
    """Yields the middle of every image u8[N, H, W, C], [n, W, C]; or of features f[N, F], [n]."""
    images = split.images
    array, index = images, np.arange(len(images))
    if isinstance(images, Rows):
        array, index = images.array, images.index
    for rows in blocks(index):
        # Indexed at once, so that of a memory map only these bytes are read.
        yield array[rows, array.shape[1] // 2]


def _codes(parts: Iterator[np.ndarray]) -> Iterator[int]:
    """Yields Python's hash, of 64 bits, of the bytes of each row of the arrays [n, ...]."""
    return (hash(row.tobytes()) for part in parts for row in part)
