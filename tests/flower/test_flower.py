"""The deployment over Flower with its clients in this process: the simulation's numbers."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
import square_masks
from fedjax_bn.arguments.errors import UserError, WorkdirError
from fedjax_bn.engine.named_arrays import names_of
from fedjax_bn.federation import broadcast_of, global_variables

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from fedjax_bn.flower.messages import Answer, Order, arrays_in, packed, record_in, recorded
from fedjax_bn.flower.server import serve
from fedjax_bn.flower.settings import config_of, run_of
from fedjax_bn.run.experiment import build
from fedjax_bn.serving import load, predictor
from fedjax_bn.training.evaluation.evaluate import evaluator
from flower_apps import assert_same, nodes_of, run_config, simulated
from flower_grid import LocalGrid, key_of

OF_UPLOAD = ("size", "risk", "loss", "finite", "participates", "client", "population")
SLOW = ("fedavg", "fedbn", "fedfa", "fediga", "scaffold")


@pytest.mark.parametrize(
    "changes",
    [
        # Its broadcast and messages are as large as all clients.
        pytest.param("method=copa:gates=False", marks=pytest.mark.slow),
        "method=fedcd",  # weights by risks, and a message that is broadcast in the next round
        *(pytest.param(f"method={name}", marks=pytest.mark.slow) for name in SLOW),
        pytest.param("method=fedbn,weigh=norm_clipping:factor=0.5", marks=pytest.mark.slow),
        # Clients of unequal sizes end their epochs with empty steps in the simulation alone.
        pytest.param(
            "method=fedcd,local_epochs=3,local_selection=2,batch_size=4", marks=pytest.mark.slow
        ),
        pytest.param("method=fedavg,local_steps=7,batch_size=4", marks=pytest.mark.slow),
    ],
)
def test_numbers_are_the_simulations_and_nothing_else_travels(folder, tmp_path, changes, caplog):
    config = run_config(tmp_path, changes)
    grid = LocalGrid(nodes_of(folder, config))
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        kept, _ = serve(grid, run_of(config), folder)
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
    assert sum("resident" in one for one in compiled) == 2  # once a client, for two rounds
    state, sent = simulated(folder, changes)
    assert_same(folder, kept, record_in(grid.sent[-1][0].content, Order).federation, state)
    assert check_what_travels(grid, state, sent) == 4


@pytest.mark.slow
def test_frozen_leaves_are_sent_once_and_kept(folder, tmp_path):
    changes = "method=fedbn,frozen=all_but_batch_norm"
    # Its samples do not stay on the device, which changes no number.
    config = run_config(tmp_path, f"{changes},data.device_megabytes=0")
    grid = LocalGrid(nodes_of(folder, config))
    kept, _ = serve(grid, run_of(config), folder)
    state, sent = simulated(folder, changes)
    federation = record_in(grid.sent[-1][0].content, Order).federation
    assert_same(folder, kept, federation, state)
    names = set(names_of({"frozen": state.frozen}))
    trained = [pair for pair in grid.sent if pair[0].metadata.message_type == "train"]
    for down, up in trained:
        asked, answered = arrays_in(down.content), arrays_in(up.content)
        order = record_in(down.content, Order)
        extra = names if order.begin == 0 else set()
        assert set(asked) == {*names_of(broadcast_of(state)), *extra}
        assert not set(answered) & names
        moved = sum(x.nbytes for name, x in asked.items() if name not in names)
        assert moved == sent["down"]
    assert [bool(record_in(down.content, Order).begin) for down, _ in trained].count(False) == 2
    path = folder / "client-0" / federation / "frozen.npz"
    with np.load(path) as arrays:
        assert set(arrays) == names
    path.unlink()
    last = next(d for d, _ in reversed(trained) if d.metadata.dst_node_id == 10)
    with pytest.raises(WorkdirError, match=r"frozen\.npz"):
        grid.nodes[10](last)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedbn", "fedrdn", "ditto", "fedawa"])
def test_clients_with_masks_train_and_report_dice_as_the_simulation_does(
    folder, tmp_path, monkeypatch, name
):
    data = square_masks.dataset(names=runs.NAMES)
    runs.install(monkeypatch, data)
    changes = f"method={name},model=double_net:DoublePixels,data.image_size=16,batch_size=4"
    changes += ",statistics=precise"  # each site estimates them from its own samples
    config = run_config(tmp_path, changes, serve_unseen=True)
    how = {"report": "sizes,losses,accuracies", "serve-unseen": True}
    grid = LocalGrid(nodes_of(folder, config, **how))
    kept, records = serve(grid, run_of(config), folder)
    state, _ = simulated(folder, changes)
    assert_same(folder, kept, record_in(grid.sent[-1][0].content, Order).federation, state)
    trained = [answer for _, answer in grid.sent if answer.metadata.message_type == "train"]
    arrays = {name for answer in trained for name in arrays_in(answer.content)}
    assert any(name.startswith("personal/") for name in arrays) == (name == "fedbn")
    form = json.loads((tmp_path / "config.json").read_text())["samples"]
    assert json.loads(form)["masks"] == ["mask"]
    experiment, *_ = build.prepare(config_of("config.py", changes, folder), traced=False)
    expected = evaluator(experiment)(jax.tree.map(jnp.asarray, state))
    assert records[-1]["tested_on"] == {"internal": "test"}
    for name in ("accuracy", "validation"):
        found = list(records[-1][name].values())
        np.testing.assert_allclose(found, list(expected[name].values()), rtol=1e-6)
    # What an unseen client receives segments as the simulation's model does.
    served = tmp_path / "served"
    assert json.loads((served / "summary.json").read_text())["score"] == "Dice"
    given = [f"--workdir={served}", f"--export={tmp_path / 'model'}", "--trust"]
    assert runs.command("serve", *given) == 0
    images = data.domains[2].test.images
    mine = predictor(experiment.method, global_variables(state))(images)
    np.testing.assert_allclose(load(tmp_path / "model", trust=True)(images), mine, atol=1e-5)


def check_what_travels(grid, state, sent):
    """Returns how many trainings there were, whose messages hold what the method names."""
    trained = [pair for pair in grid.sent if pair[0].metadata.message_type == "train"]
    shared, personal = (names_of({"shared": x}) for x in (state.shared, state.personal))
    message = {n for n in arrays_in(trained[0][1].content) if n.startswith("message/")}
    for down, up in trained:
        asked, answered = arrays_in(down.content), arrays_in(up.content)
        assert set(asked) == set(names_of(broadcast_of(state)))
        assert set(answered) == {*shared, *message, *OF_UPLOAD}
        assert not {*asked, *answered} & {*personal}
        assert sum(x.nbytes for x in asked.values()) == sent["down"]
        assert sum(x.nbytes for x in answered.values()) == sent["up"]
        assert {*down.content, *up.content} == {"arrays", "header"}
    return len(trained)


# It has personal leaves, memory and messages.
SCAFFOLD = "method=scaffold,share=all_but_batch_norm,rounds=4"


def in_round(message):
    return int(arrays_in(message.content)["round"]) + 1


@pytest.mark.slow
def test_who_fails_is_left_out_and_comes_back_and_a_server_that_ended_continues(
    folder, tmp_path, caplog
):
    """Client 1 sends NaN in round 2, is away in round 3, and comes back as another node.

    In round 2 too few uploads end the server first. Client 0 has trained that round then, and
    trains it again.
    """
    config = run_config(tmp_path / "server", SCAFFOLD)
    grid = LocalGrid(nodes_of(folder, config))
    first, second = grid.nodes[10], grid.nodes[11]
    run = run_of(config | {"minimum": 1})

    def fails(message):
        reply = second(message)
        if message.metadata.message_type == "train" and in_round(message) == 2:
            arrays, header = arrays_in(reply.content), record_in(reply.content, Answer)
            arrays["shared/params/out/bias"] = arrays["shared/params/out/bias"] * np.nan
            reply.content = packed(header, recorded(arrays))
            failed.append(message)
            if len(failed) == 2:
                del grid.nodes[11]
        return reply

    def sees_it_come_back(message):
        if message.metadata.message_type == "train" and in_round(message) == 3:
            grid.nodes[12], grid.keys[12] = second, key_of(11)
        return first(message)

    failed = []
    grid.nodes |= {10: sees_it_come_back, 11: fails}
    with pytest.raises(UserError, match="round 2 got 1 good uploads"):
        serve(grid, run_of(config), folder)
    with caplog.at_level(logging.WARNING, "flwr"):
        kept, records = serve(grid, run, folder)
    (tmp_path / "trace.txt").write_text("all\n0\n0\nall\n")
    state, sent = simulated(
        folder, f"{SCAFFOLD},participation=uniform:trace={tmp_path / 'trace.txt'}"
    )
    assert_same(folder, kept, record_in(grid.sent[-1][0].content, Order).federation, state)
    assert check_what_travels(grid, state, sent) == 2 + 2 + 2 + 1 + 2
    assert [record["round"] for record in records] == [1, 2, 3, 4]
    left_out = [record.get("left_out", {}) for record in records]
    assert [list(names) for names in left_out] == [[], ["client-1"], ["client-1"], []]
    assert "the array shared/params/out/bias is not finite" in left_out[1]["client-1"]
    assert f"round 2: client-1 is left out: {left_out[1]['client-1']}" in caplog.text
    _, again = serve(LocalGrid({}), run, folder)
    assert again == records  # no client is needed where nothing is left to do


NOISY = "method=fedbn,rounds=1,privacy=client:clip=0.1:noise=2,clients_per_round=1"


@pytest.fixture
def asked(monkeypatch):
    """(noise, rounds, delta, cohort) of which an epsilon was asked, which is 7.5."""
    given = []
    monkeypatch.setattr(build, "epsilon", lambda *x: given.append(x) or 7.5)
    return given


@pytest.mark.slow
def test_asked_twice_a_client_answers_with_other_noise_and_the_run_says_epsilon(
    folder, asked, tmp_path, caplog
):
    """The client gets the same message both times, so that the noise is its own."""
    config = run_config(tmp_path / "server", NOISY, serve_unseen=True)
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
    changes = f"method=fedbn,privacy={side}:clip=0.1:noise=2:seed=3"
    config = run_config(tmp_path / "server", changes)
    grid = LocalGrid(nodes_of(folder, config))
    with caplog.at_level(logging.WARNING, "flwr"):
        kept, _ = serve(grid, run_of(config), folder)
    assert "seed=3" in caplog.text
    state, _ = simulated(folder, changes)
    assert_same(folder, kept, record_in(grid.sent[-1][0].content, Order).federation, state)


@pytest.mark.slow
def test_without_a_seed_two_servers_draw_different_noise_and_keep_its_seed_to_themselves(
    folder, asked, tmp_path
):
    changes = "method=fedbn,rounds=1,privacy=server:clip=0.1:noise=2"
    kernels = []
    for name in ("a", "b"):
        config = run_config(tmp_path / name, changes)
        kept, _ = serve(LocalGrid(nodes_of(folder, config)), run_of(config), folder)
        kernels.append(kept.state.shared["params"]["out"]["kernel"])
        stored = json.loads((tmp_path / name / "config.json").read_text())["config"]
        assert stored["privacy"] == "server:clip=0.1:noise=2"
    assert np.std(kernels[0] - kernels[1]) > 0.01
