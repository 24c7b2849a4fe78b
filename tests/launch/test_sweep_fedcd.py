"""What FedCD's masks suppress: how channels are told apart."""

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "launch" / "sweeps"))

import fedcd_small  # noqa: E402


def test_the_share_that_groups_explain_is_between_none_and_all():
    random = np.random.default_rng(0)
    groups = np.arange(400) % 4
    noise = random.normal(size=400)
    features = np.stack([groups, noise, groups + np.sqrt(1.25) * noise, np.ones(400)], 1)
    shares = fedcd_small.explained(features, groups)
    np.testing.assert_allclose(shares[[0, 3]], [1, 0])
    assert shares[1] < 0.05
    assert abs(shares[2] - 0.5) < 0.1
