"""Tested samples that are byte for byte training samples are counted in a note."""

import numpy as np
import pytest

from fedjax_bn.data.division.clients import duplicate_notes, make_clients
from fedjax_bn.data.domain import Dataset, Domain, Rows, Split
from fedjax_bn.data.source import Pool, Source

RNG = np.random.default_rng(0)


def split(images: np.ndarray) -> Split:
    return Split(images, np.zeros(len(images), np.int32))


def dataset(**clients: tuple[np.ndarray, np.ndarray]) -> Dataset:
    domains = (Domain(name, split(a), None, split(b)) for name, (a, b) in clients.items())
    return Dataset("x", 1, tuple(domains), (0.5,), (0.5,))


def samples(kind: str, count: int) -> np.ndarray:
    """Images or features; all agree in the middle, so that only whole samples tell them apart."""
    if kind == "bytes":
        images = RNG.integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    else:
        images = RNG.standard_normal((count, 7), dtype=np.float32)
    images[:, 3] = 1
    return images


@pytest.mark.parametrize("kind", ["bytes", "features"])
@pytest.mark.parametrize("lazy", [False, True])
def test_copies_are_counted_by_domain_as_comparing_all_pairs_counts_them(kind, lazy):
    a, b, new = samples(kind, 20), samples(kind, 30), samples(kind, 10)
    test_a, test_b = np.concatenate([b[:3], samples(kind, 5)]), samples(kind, 4)
    new[[1, 7]] = a[[4, 4]]
    if lazy:
        a, b = (Rows(images, np.arange(len(images))) for images in (a, b))
    data = dataset(a=(a, test_a), b=(b, test_b))
    (note,) = duplicate_notes(data, (Domain("z", None, None, split(new)),))
    trained = np.concatenate([np.asarray(a), np.asarray(b)])
    for name, tested, client in (("a", test_a, "b"), ("z", new, "a")):
        equal = (tested[:, None] == trained).reshape(len(tested), len(trained), -1).all(-1).any(1)
        assert f"{equal.sum()} of the {len(tested)} of {name} (most in {client})" in note
    assert " of b (" not in note
    assert duplicate_notes(dataset(a=(a, samples(kind, 3)), b=(b, test_b))) == ()


def test_a_target_that_is_a_copy_of_a_client_is_told():
    images = RNG.integers(0, 256, (20, 6, 6, 3), dtype=np.uint8)
    names = {name: np.array([f"{name}/{k}" for k in range(20)]) for name in "az"}
    pools = tuple(Pool(name, images, np.arange(20) % 2, names[name]) for name in "az")
    source = Source("x", ("0", "1"), pools, (0.5,), (0.5,))
    (note,) = duplicate_notes(*make_clients(source, target="z"))
    assert "18 of the 20 of z (most in a)" in note


def test_clients_that_share_their_test_samples_are_one_place():
    a, b = samples("bytes", 8), samples("bytes", 8)
    shared = split(a[:2])
    domains = (Domain("d/0", split(a), None, shared), Domain("d/1", split(b), None, shared))
    (note,) = duplicate_notes(Dataset("x", 1, domains, (0.5,), (0.5,)))
    assert note.count(" of the 2 of ") == 1
