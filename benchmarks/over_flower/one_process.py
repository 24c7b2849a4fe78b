"""Runs a federation in this process with Flower's messages, beside the simulation of its clients.

No process is started and no network is used, so the difference is the cost of a round in addition
to its training. Clients that send back what they get measure Flower's own share of this cost.
"""

import logging
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))  # the Grid in memory is there

from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedjax_bn.engine.named_arrays import to_named
from fedjax_bn.federation import broadcast_of
from fedjax_bn.flower import client_app
from fedjax_bn.flower import server as app_server
from fedjax_bn.flower.messages import exchange
from fedjax_bn.flower.settings import run_of
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.training.rounds import open_rounds
from flower_grid import LocalGrid, node
from over_flower import configured, write_config


class Overhead(NamedTuple):
    """CPU seconds of one round, the least over rounds, because other programs only add to them."""

    simulated: float  # all clients in one program
    federated: float  # from the server's question to its state after the round and its checkpoint
    flower: float  # the same messages with clients that only read them and send them back


def overhead(clients: int, rounds: int, changes: str = "") -> Overhead:
    """Measures `rounds` rounds after one that compiles; `changes` are `key=value,...`."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_config(folder, clients)
        changes = ",".join(filter(None, (f"rounds={rounds + 2}", changes)))
        simulated = min(_simulated(configured(folder, changes), rounds))
        federated = min(_federated(folder, clients, changes))
        flower = min(_echoed(configured(folder, changes), clients, rounds))
    return Overhead(simulated, federated, flower)


def _simulated(config: Any, rounds: int) -> Iterator[float]:
    experiment, keys, start = prepare(config)
    state = start()
    round = open_rounds(experiment, keys, state).compile(state)
    state, _ = round(state)
    for _ in range(rounds):
        began = time.process_time()
        state, _ = jax.block_until_ready(round(state))
        yield time.process_time() - began


def _federated(folder: Path, clients: int, changes: str) -> list[float]:
    """Returns seconds of each round but the first and the last, with its checkpoint."""
    config = {"config": "config.py", "changes": changes, "clients": clients}
    run = config | {"workdir": str(folder / "server"), "minimum": clients}
    app = client_app(folder)
    nodes = {
        10 + k: node(app, run, client=k, folder=str(folder / f"client-{k}"), report="sizes,losses")
        for k in range(clients)
    }
    times: list[float] = []
    play = app_server.play

    def timed(*given: Any) -> Any:
        times.append(time.process_time())
        return play(*given)

    # `play` begins every round, so that two calls enclose a round and its checkpoint
    app_server.play = timed
    try:
        app_server.serve(_forgetful(nodes), run_of(run), folder)
    finally:
        app_server.play = play
    return list(np.diff(times)[1:])


def _forgetful(nodes: dict[int, Callable]) -> LocalGrid:
    """Returns a Grid that keeps no message after its answer."""
    grid = LocalGrid(nodes)
    grid.sent = deque(maxlen=0)
    return grid


def _read(message: Message) -> None:
    """Reads the arrays of a message."""
    for array in message.content["arrays"].values():
        array.numpy()


def _echoed(config: Any, clients: int, rounds: int) -> Iterator[float]:
    """Yields the seconds of messages of the same arrays, to the clients and back."""
    _, _, start = prepare(config)
    arrays = to_named(broadcast_of(start()))

    def answer(message: Message) -> Message:
        found = message.content["arrays"].items()
        again = ArrayRecord({name: Array(array.numpy()) for name, array in found})
        return Message(RecordDict({"arrays": again}), reply_to=message)

    grid = _forgetful({10 + k: answer for k in range(clients)})
    for _ in range(rounds):
        began = time.process_time()
        record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        contents = {10 + k: RecordDict({"arrays": record}) for k in range(clients)}
        exchange(grid, contents, "train", 60, lambda node, reply: _read(reply))
        yield time.process_time() - began
