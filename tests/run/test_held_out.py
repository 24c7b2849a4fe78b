"""Validation samples of a data set that comes divided without: the digits' `.npz`."""

import numpy as np
import pytest

from fedjax_bn.run.config.keys import base
from fedjax_bn.run.experiment.datasets import (
    DATASETS,
    configured_clients,
)

NAMES = ("mnist", "svhn", "usps")
COUNTS = {"mnist": 100, "svhn": 150, "usps": 50}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Images whose first pixels number the samples of all domains and parts."""
    arrays, number = {}, 0
    for name in NAMES:
        for part, size in (("train", COUNTS[name]), ("test", 20)):
            images = np.zeros((size, 28, 28, 3), np.uint8)
            images[:, 0, 0, 0], images[:, 0, 0, 1] = divmod(np.arange(number, number + size), 200)
            arrays[f"{name}__{part}_images"], number = images, number + size
            arrays[f"{name}__{part}_labels"] = np.arange(size) % 10
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    np.savez(path, **arrays)
    return path


def configured(path, **changes):
    config = base()
    keys = {"data.name": "digits", "data.path": str(path), "target": "", "seed": 3}
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    config.update_from_flattened_dict(keys)
    return config


def clients(path, **changes):
    config = configured(path, **changes)
    internal, unseen = configured_clients(DATASETS["digits"](config), config)
    return {domain.name: domain for domain in (*internal.domains, *unseen)}


def numbers(split):
    first = np.asarray(split.images)[:, 0, 0].astype(int)
    return first[:, 0] * 200 + first[:, 1]


def test_held_out_digits_are_a_share_of_each_class_and_nothing_else_changes(file):
    plain, held = clients(file), clients(file, data__split="official", data__validation=0.2)
    for name, domain in held.items():
        assert (np.bincount(domain.validation.labels) * 10 == COUNTS[name] // 5).all()
        mine, theirs = numbers(domain.train), numbers(domain.validation)
        assert sorted([*mine, *theirs]) == sorted(numbers(plain[name].train))
        np.testing.assert_array_equal(numbers(domain.test), numbers(plain[name].test))
