"""Finds tested samples that are byte for byte training samples."""

from collections import Counter
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
    trained = {client.name: _codes(_middle_rows(client.train)) for client in dataset.domains}
    middles = {code for codes in trained.values() for code in codes}
    tests = {id(domain.test): (domain.name, domain.test) for domain in dataset.domains}
    suspects, alike = {}, set()
    for name, split in [*tests.values(), *((domain.name, whole(domain)) for domain in unseen)]:
        codes = _codes(_middle_rows(split))
        rows = [row for row, code in enumerate(codes) if code in middles]
        suspects[name] = split, rows
        alike |= {codes[row] for row in rows}
    owners: dict[int, str] = {}  # hash of a whole image -> the client that trains on it
    for client in dataset.domains:
        rows = [row for row, code in enumerate(trained[client.name]) if code in alike]
        for code in _whole_codes(client.train, rows):
            owners.setdefault(code, client.name)
    counts = []
    for name, (split, rows) in suspects.items():
        copies = Counter(owners[code] for code in _whole_codes(split, rows) if code in owners)
        for client, _ in copies.most_common(1):
            counts.append(
                f"{copies.total()} of the {len(split.images)} of {name} (most in {client})"
            )
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


def _whole_codes(split: Split, rows: Sequence[int]) -> list[int]:
    return _codes(blocks(select(split, np.array(rows, np.int64)).images))


def _codes(parts: Iterator[np.ndarray]) -> list[int]:
    """Returns Python's hash, of 64 bits, of the bytes of each row of the arrays [n, ...]."""
    return [hash(row.tobytes()) for part in parts for row in part]
