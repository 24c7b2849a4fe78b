"""A ServerApp that sends arrays to all clients and reads their replies, round by round.

The run config's `config` is an .npz of the arrays, `changes` is "rounds=N"; WORKDIR/metrics.jsonl
gets a line for each round, as in fedjax_bn.
"""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Plays the rounds."""
    run = context.run_config
    with np.load(str(run["config"])) as file:
        arrays = dict(file)
    nodes: list[int] = []
    while len(nodes) < int(run["clients"]):
        time.sleep(0.5)
        nodes = list(grid.get_node_ids())
    log = Path(str(run["workdir"])) / "metrics.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    for number in range(int(str(run["changes"]).removeprefix("rounds="))):
        began = time.perf_counter()
        _play(grid, nodes, arrays)
        with log.open("a") as file:
            file.write(json.dumps({"round": number + 1, "seconds": time.perf_counter() - began}))
            file.write("\n")


def _play(grid: Grid, nodes: list[int], arrays: dict[str, np.ndarray]) -> None:
    """Sends the arrays and collects the replies, polling as often as fedjax_bn."""
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    messages = [Message(RecordDict({"arrays": record}), node, "train", ttl=900) for node in nodes]
    waiting = set(grid.push_messages(messages))
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            [array.numpy() for array in reply.content["arrays"].values()]
        time.sleep(0.5)
