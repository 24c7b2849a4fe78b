"""The deployment over Flower with its clients in this process: the simulation's numbers."""

import jax
import numpy as np
import pytest

import runs
from federations import assert_close
from fedjax_bn.federation import broadcast_of
from fedjax_bn.named_arrays import names_of
from fedjax_bn.run.rounds import open_rounds
from fedjax_bn.run.start import prepare
from fedjax_bn.traffic import traffic

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from fedjax_bn.flower import client_app, own_part
from fedjax_bn.flower.records import arrays_in, order_in
from fedjax_bn.flower.server import serve
from fedjax_bn.flower.settings import config_of, run_of
from flower_grid import LocalGrid, node

CONFIG = """
from fedjax_bn.run.config import base, override

def get_config(changes=""):
    config = base()
    config.model = "double_net:DoubleNet"
    config.rounds = 2
    config.batch_size = 8
    config.optimizer.momentum = 0.5
    config.seed = 2
    config.mesh = "1"
    config.data.name, config.data.path, config.target = "tiny", "none", "cow,dog"
    return override(config, changes)
"""
OF_UPLOAD = ("size", "risk", "loss", "finite", "participates", "client", "population")
QUIET = "sizes,losses"  # what clients report where nobody shall be evaluated, which compiles


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all tests: clients that are configured alike compile once."""
    folder = tmp_path_factory.mktemp("app")
    (folder / "config.py").write_text(CONFIG)
    return folder


@pytest.fixture(autouse=True)
def tiny(x64, monkeypatch):
    runs.install(monkeypatch)
    with jax.numpy_dtype_promotion("standard"):  # what draws samples counts in 32 bits
        yield


def simulated(folder, changes):
    """The state behind the rounds of one program of the same configuration, and its traffic."""
    config = config_of("config.py", changes, folder)
    experiment, keys, start = prepare(config)
    state = start()
    rounds = open_rounds(config, experiment, keys, state)
    batches = rounds.batches | {"population": jax.ShapeDtypeStruct((), np.int32)}
    sent = traffic(experiment.method, jax.eval_shape(start), batches)
    round = rounds.compile(state)
    for _ in range(config.rounds):
        state, _ = round(state)
    return jax.device_get(state), sent


def run_config(folder, workdir, changes, **more):
    config = {"config": "config.py", "changes": changes, "clients": 2, "workdir": str(workdir)}
    config |= {"time-limit": 20, "attempts": 1}
    return config | {key.replace("_", "-"): value for key, value in more.items()}


def nodes_of(folder, config, report=QUIET, **more):
    app = client_app(folder)
    places = {k: str(folder / f"client-{k}") for k in range(2)}
    return {
        10 + k: node(app, config, client=k, folder=places[k], report=report, **more) for k in places
    }


def own_parts(folder, order, number, state):
    """What the clients' folders hold behind a round, as rows like those of a state."""
    like = jax.tree.map(lambda x: x[0], own_part.Own(state.personal, state.memory))
    places = [folder / f"client-{k}" / order.federation for k in range(2)]
    parts = [own_part.load(place, number, like) for place in places]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)


SLOW = ("fedavg", "fedbn", "fediga", "scaffold")


@pytest.mark.parametrize(
    "changes",
    [
        "method=scaffold,share=all_but_batch_norm",  # personal leaves, memory and messages
        "method=fedcd",  # weights by risks, and a message that is broadcast in the next round
        *(pytest.param(f"method={name}", marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_numbers_are_those_of_the_simulation_and_nothing_else_travels(folder, tmp_path, changes):
    config = run_config(folder, tmp_path, changes)
    grid = LocalGrid(nodes_of(folder, config))
    kept, _ = serve(grid, run_of(config), folder)
    state, sent = simulated(folder, changes)
    parts = own_parts(folder, order_in(grid.sent[-1][0].content), 2, state)
    for ours, theirs in (
        (kept.state.shared, state.shared),
        (kept.state.server, state.server),
        (kept.state.weights, state.weights),
        (parts.personal, state.personal),
        (parts.memory, state.memory),
    ):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-12)

    trained = [pair for pair in grid.sent if pair[0].metadata.message_type == "train"]
    assert len(trained) == 4
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
