"""Measures the memory of a server over Flower by the number of clients and the weighing rule.

  python benchmarks/flower_memory.py --clients 2,8,32

Each number of clients and each rule has a process of its own, in which a server plays two rounds,
checkpoints included, and nothing trains. The clients' answers have Flower's bytes. As at a
SuperLink, they are not in the server's memory before it fetches them: the Grid makes an answer in
that moment. The model is an MLP on images of 224 x 224, of 9.6 MB.

The table has the largest resident memory of the process (`ru_maxrss`), and by how much it is above
that before the first round, in uploads.
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

CONFIG = """
from fedjax_bn.run.config import base, override

def get_config(changes=""):
    config = base()
    config.method, config.model, config.rounds, config.mesh.clients = "fedbn", "MLP", 2, 1
    return override(config, changes)
"""
FORM = {"num_classes": 7, "shape": [224, 224, 3], "dtype": "uint8", "mean": [0.5], "std": [0.5]}
RULES = ("by_size", "coordinate_median")
SIZE = 100  # samples of each client


class Grid:
    """A Grid of Flower whose nodes answer when the server fetches their answers."""

    def __init__(self, clients: int) -> None:
        """Makes nodes for clients from 0."""
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
        self.clients, self.asked, self.before, self.upload = clients, {}, 0.0, 0

    def get_nodes(self) -> list:
        """Returns the nodes; none has a key."""
        from flwr.proto.node_pb2 import NodeInfo

        return [NodeInfo(node_id=1 + k, public_key=b"none") for k in range(self.clients)]

    def push_messages(self, messages: list) -> list[str]:
        """Keeps the messages, which share the bytes of the broadcast."""
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"{len(self.asked)}-{message.object_id}"
            self.asked[message.metadata.message_id] = message
            if message.metadata.message_type == "train":
                self.before = self.before or peak()
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, names: list[str]) -> list:
        """Makes the answer to one message, and reads it from its bytes."""
        from flwr.common.serde import message_from_proto, message_to_proto
        from flwr.proto.message_pb2 import Message

        reply = self.answer(self.asked.pop(names[0]))
        data = message_to_proto(reply).SerializeToString()
        del reply
        return [message_from_proto(Message.FromString(data))]

    def answer(self, message):
        """Returns the greeting of a client, or its upload: the broadcast with noise."""
        from flwr.app import Message

        from fedjax_bn.flower.messages import (
            Answer,
            Hello,
            Order,
            arrays_in,
            packed,
            record_in,
            recorded,
        )

        order, k = record_in(message.content, Order), message.metadata.dst_node_id - 1
        header = Answer(order.federation, order.method, k, order.round)
        if message.metadata.message_type == "query":
            hello = Hello("", SIZE, True, False, json.dumps(FORM))
            return Message(packed(header, hello=hello), reply_to=message)
        random, one, number = np.random.default_rng(k), np.float32(1), np.int32
        arrays = {
            name: array + random.normal(0, 1e-4, array.shape).astype(array.dtype)
            for name, array in arrays_in(message.content).items()
            if name.startswith("shared/")
        }
        self.upload = sum(array.nbytes for array in arrays.values())
        flags = {name: np.array(True) for name in ("finite", "participates")}
        arrays |= flags | {"size": number(SIZE), "risk": one, "loss": one, "client": number(k)}
        arrays["population"] = number(order.population)
        return Message(packed(header, recorded(arrays)), reply_to=message)


def peak() -> float:
    """Returns the largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(clients: int, rule: str) -> dict[str, float]:
    """Plays two rounds; returns the megabytes at most, before the first round, and of an upload."""
    from fedjax_bn.flower.server import serve
    from fedjax_bn.flower.settings import run_of

    logging.getLogger("flwr").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.py").write_text(CONFIG)
        run = {"config": "config.py", "changes": f"weigh={rule}", "clients": clients}
        grid = Grid(clients)
        serve(grid, run_of(run | {"workdir": str(Path(folder) / "server")}), folder)
    return {"peak": peak(), "before": grid.before, "upload": grid.upload / 1e6}


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", default="2,8,32", help="numbers, with commas")
    parser.add_argument("--one", default="", help="CLIENTS,RULE: measure in this process")
    given = parser.parse_args()
    if given.one:
        clients, rule = given.one.split(",")
        print(json.dumps(measure(int(clients), rule)))
        return
    print("| clients | " + " | ".join(f"{rule}: MB | in uploads" for rule in RULES) + " |")
    print("|---" * (1 + 2 * len(RULES)) + "|")
    for clients in given.clients.split(","):
        cells = []
        for rule in RULES:
            command = [sys.executable, __file__, "--one", f"{clients},{rule}"]
            found = json.loads(subprocess.check_output(command).splitlines()[-1])
            more = (found["peak"] - found["before"]) / found["upload"]
            cells += [f"{found['peak']:.0f}", f"{more:.1f}"]
        print(f"| {clients} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
