"""The converters of published originals, on tiny files of their forms."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import LAUNCH

import tiny_digits
from fedjax_bn.data.sets.digits import load_digits
from tiny_digits import TEST, TRAIN


def convert(name, *arguments):
    """Runs a converter as a user does."""
    command = [sys.executable, str(LAUNCH / "convert" / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tiny_digits.write_originals(tmp_path_factory.mktemp("digits"))
    tiny_digits.write_morpho(folder / "Morpho-MNIST")
    return folder


@pytest.fixture(scope="module")
def files(originals, tmp_path_factory):
    place = tmp_path_factory.mktemp("made")
    for name, options in (("plain", ()), ("morpho", ("--morpho",))):
        convert("digits", originals, place / f"{name}.npz", *options)
    return place


def test_the_digits_have_all_samples_with_their_labels_divided_80_to_20(files):
    """The level of a plain image tells its sample; from 100 on those of published tests."""
    totals = [TRAIN, TRAIN + 7, TRAIN, TRAIN + 7, TRAIN + 3]
    domains = load_digits(files / "plain.npz").domains
    assert [d.name for d in domains] == ["mnist", "svhn", "usps", "synth_digits", "mnist_m"]
    for domain, total in zip(domains, totals, strict=True):
        assert len(domain.train.labels) == 4 * (total + TEST) // 5
        levels = [split.images[:, 14, 14, 0].astype(int) for split in (domain.train, domain.test)]
        labels = np.concatenate([domain.train.labels, domain.test.labels])
        levels = np.concatenate(levels)
        np.testing.assert_array_equal(np.sort(levels), [*range(total), *range(100, 100 + TEST)])
        np.testing.assert_array_equal(labels, levels % 100 % 10)


def test_no_digit_that_morpho_mnist_shows_trains(files):
    morpho = ("morpho_global", "morpho_local")
    domains = {d.name: d for d in load_digits(files / "morpho.npz", target=morpho).domains}
    plain = {d.name: d for d in load_digits(files / "plain.npz").domains}
    for name, domain in plain.items():
        levels = domains[name].train.images[:, 14, 14, 0]
        assert (levels.max() < 100) == (name in ("mnist", "mnist_m"))
        np.testing.assert_array_equal(domains[name].test.images, domain.test.images)
    for name in morpho:
        assert domains[name].train is None
        assert domains[name].test.images[:, 0, 0, 0].tolist() == list(range(200, 206))


def test_a_missing_or_damaged_original_is_named_whole(originals, tmp_path):
    for name, damage in (("MNIST-M/mnist_m_test_labels.txt", None), ("USPS/usps.bz2", b"BZh")):
        path = originals / name
        content = path.read_bytes()
        path.unlink() if damage is None else path.write_bytes(damage)
        with pytest.raises(subprocess.CalledProcessError) as error:
            convert("digits", originals, tmp_path / "a.npz")
        assert str(path) in error.value.stderr
        path.write_bytes(content)
