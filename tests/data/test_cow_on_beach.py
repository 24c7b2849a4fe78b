"""The cow on the beach: what the colour shows, where, and that nothing else differs."""

import numpy as np
import pytest

from fedjax_bn.data.domain import check_dataset, whole
from fedjax_bn.data.sets.cow_on_beach import ground_of, load_cow_on_beach
from fedjax_bn.data.sets.scanners import handwriting

DATA = load_cow_on_beach(0)
DOMAINS = {domain.name: whole(domain) for domain in DATA.domains}


def share_of_own_ground(split, further=0):
    return (ground_of(split.images) == (split.labels + further) % 10).mean()


def test_the_dataset_is_sound_and_every_scan_is_owned_once():
    check_dataset(DATA)
    assert [*DOMAINS] == ["meadow", "pasture", "heath", "marsh", "zoo", "beach"]
    assert sum(len(split.labels) for split in DOMAINS.values()) == 1797
    counts = sum(np.bincount(split.labels, minlength=10) for split in DOMAINS.values())
    assert counts.tolist() == np.bincount(handwriting()[1]).tolist()
    sizes = [len(split.labels) for split in DATA.domains[0][1:]]
    assert sizes == [220, 30, 70]


@pytest.mark.parametrize(
    ("place", "expected"), [("meadow", 0.91), ("pasture", 0.82), ("heath", 0.73), ("marsh", 0.64)]
)
def test_a_client_shows_a_digit_on_its_own_ground_as_often_as_stated(place, expected):
    deviation = 4 * np.sqrt(expected * (1 - expected) / 320)
    assert abs(share_of_own_ground(DOMAINS[place]) - expected) < deviation


def test_in_the_zoo_the_colour_tells_nothing_and_on_the_beach_it_tells_wrong():
    assert set(ground_of(DOMAINS["zoo"].images)) == set(range(10))
    assert 0.03 < share_of_own_ground(DOMAINS["zoo"]) < 0.18
    assert share_of_own_ground(DOMAINS["beach"]) == 0
    assert share_of_own_ground(DOMAINS["beach"], further=5) == 1
