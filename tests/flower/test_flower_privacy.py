"""Noise over Flower: whose it is, and what the run says of it."""

import json
import logging

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from fedjax_bn.flower.messages import Order, arrays_in, record_in
from fedjax_bn.flower.server import serve
from fedjax_bn.flower.settings import run_of
from fedjax_bn.run.experiment import build as configured_privacy
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
    assert "repeat the noise of privacy.seed=3" in caplog.text
    state, _ = simulated(folder, changes)
    assert_same(folder, kept, record_in(grid.sent[-1][0].content, Order).federation, state)


@pytest.mark.slow
def test_without_a_seed_two_servers_draw_different_noise_and_keep_its_seed_to_themselves(
    folder, asked, tmp_path
):
    changes = "method=fedbn,rounds=1,privacy.clip=0.1,privacy.noise=2,privacy.at=server"
    kernels = []
    for name in ("a", "b"):
        config = run_config(tmp_path / name, changes)
        kept, _ = serve(LocalGrid(nodes_of(folder, config)), run_of(config), folder)
        kernels.append(kept.state.shared["params"]["out"]["kernel"])
        stored = json.loads((tmp_path / name / "config.json").read_text())["config"]
        assert stored["privacy.seed"] is None
    assert np.std(kernels[0] - kernels[1]) > 0.01
