"""Noise over Flower: whose it is, and what the run says of it."""

import json
import logging

import jax
import numpy as np
import pytest

import runs

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from fedjax_bn.flower.messages import Order, arrays_in, record_in
from fedjax_bn.flower.server import _with_own_noise, serve
from fedjax_bn.flower.settings import run_of
from fedjax_bn.flower.site import _training_keys
from fedjax_bn.run.experiment import build as configured_privacy
from fedjax_bn.training.start import Keys
from flower_apps import assert_same, nodes_of, run_config, simulated
from flower_grid import LocalGrid

CHANGES = (
    "method=fedbn,rounds=1,privacy.clip=0.1,privacy.noise=2,privacy.at=client,clients_per_round=1"
)


@pytest.fixture
def asked(monkeypatch):
    """(noise, rounds, delta, cohort) of which an epsilon was asked, which is 7.5."""
    given = []
    monkeypatch.setattr(configured_privacy, "epsilon", lambda *x: given.append(x) or 7.5)
    return given


@pytest.mark.slow
def test_asked_twice_a_client_answers_with_other_noise_and_the_run_says_epsilon(
    folder, asked, tmp_path, caplog
):
    """The client gets the same message both times, so that the noise is its own."""
    config = run_config(tmp_path / "server", CHANGES, serve_unseen=True)
    grid = LocalGrid(nodes_of(folder, config, serve_unseen=True))
    with caplog.at_level(logging.INFO, "flwr"):
        serve(grid, run_of(config), folder)
    (down, up) = next(pair for pair in grid.sent if pair[0].metadata.message_type == "train")
    again = grid.nodes[down.metadata.dst_node_id](down)
    first, second = (arrays_in(x.content)["shared/params/out/kernel"] for x in (up, again))
    # Two draws of N(0, (z C)^2) differ by sqrt(2) z C a number.
    assert np.std(first - second) == pytest.approx(np.sqrt(2) * 0.2, rel=0.6)

    assert set(asked) == {(2.0, 1, 1e-5, ())}  # who answers is not a secret draw
    assert "is added by the client: each client has (epsilon, delta) = (7.5, 1e-05)" in caplog.text
    for path in ("config.json", "served/summary.json"):
        about = json.loads((tmp_path / "server" / path).read_text())["privacy"]
        assert (about["epsilon"], about["rounds"]) == (7.5, 1)


def test_only_the_side_that_adds_the_noise_draws_its_key():
    keys = Keys(*jax.random.split(jax.random.key(0), len(Keys._fields)))
    at = {
        side: runs.config(privacy__clip=1.0, privacy__noise=1.0, privacy__at=side)
        for side in ("client", "server")
    }
    drawn = [_training_keys(at["client"], keys) for _ in range(2)]
    words = {tuple(jax.random.key_data(one.method).tolist()) for one in (keys, *drawn)}
    assert len(words) == 3
    assert all(one._replace(method=keys.method) == keys for one in drawn)
    assert _training_keys(at["server"], keys) is keys
    seeds = {_with_own_noise(at["server"]).privacy.seed for _ in range(2)}
    assert len(seeds) == 2
    assert at["server"].privacy.seed is None
    assert _with_own_noise(at["client"]) is at["client"]
    quiet = runs.config(privacy__clip=1.0)
    assert _with_own_noise(quiet) is quiet


@pytest.mark.slow
@pytest.mark.parametrize("side", ["server", "client"])
def test_with_a_seed_the_noise_is_the_simulations_and_the_server_warns(
    folder, asked, tmp_path, caplog, side
):
    changes = f"method=fedbn,privacy.clip=0.1,privacy.noise=2,privacy.seed=3,privacy.at={side}"
    config = run_config(tmp_path / "server", changes)
    grid = LocalGrid(nodes_of(folder, config))
    with caplog.at_level(logging.WARNING, "flwr"):
        kept, _ = serve(grid, run_of(config), folder)
    assert "privacy.seed=3 makes noise that can be repeated" in caplog.text
    state, _ = simulated(folder, changes)
    assert_same(folder, kept, record_in(grid.sent[-1][0].content, Order).federation, state)
