"""README's Python runs as it stands, and does what the text around it says."""

import re

import jax
import numpy as np
import pytest

import runs

README = (runs.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(*blocks):
    """The names that blocks leave behind, one after another."""
    names = {}
    with jax.numpy_dtype_promotion("standard"):  # what a reader's own code has
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
    return names


def test_rounds_and_clients_one_by_one_are_shown_as_they_are():
    # A smaller network in the place of DigitCNN, which compiles and trains for seconds.
    rounds, one_by_one = (block.replace("DigitCNN", "SmallCNN") for block in BLOCKS[:2])
    names = run(rounds, one_by_one)
    assert int(names["state"].round) == 3
    before = names["own"]["batch_stats"]["norm1"]["mean"]
    assert np.abs(before[0] - before[1]).max() > 0


def test_a_users_own_nnx_model_is_trained_and_serves_an_unseen_client():
    block = BLOCKS[2]
    assert len(block.splitlines()) < 30
    names = run(block)
    means = names["state"].personal["batch_stats"]["norm"]["mean"]
    assert means.shape == (3, 16)
    assert np.abs(np.diff(means, axis=0)).max() > 0
    assert names["logits"].shape == (8, 10)
    tracked = names["carry"].statistics["norm"]["mean"]
    assert np.abs(tracked - names["received"]["batch_stats"]["norm"]["mean"]).max() > 0.1


@pytest.mark.parametrize("path", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_links_lead_to_what_is_there(path):
    assert (runs.ROOT / path).exists()
