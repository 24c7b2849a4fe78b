"""Runs Flower's simulation: python -m peer_programs.flower NETWORK FILE.

It uses Flower's own strategy FedAvg over Ray with one CPU for each client, so that as many clients
train at once as there are cores, each on one thread.
"""

import sys
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from peer_programs.in_pytorch import load, load_once, train
from peer_programs.rounds import read, say, told

ROUNDS = 1_000_000  # an upper limit; the program ends when no more rounds are asked for


class Over(Exception):
    """No more rounds are asked for."""


class Asked(FedAvg):
    """FedAvg that begins a round when it is asked for, and prints each client's loss at its end."""

    def configure_train(self, *args: Any) -> Any:
        """Waits until a round is asked for, then acts as FedAvg."""
        if not told():
            raise Over
        return super().configure_train(*args)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """Acts as FedAvg, and prints the losses in the order of the clients."""
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
        result = super().aggregate_train(server_round, replies)
        found = [reply.content["metrics"] for reply in replies]
        say([one["loss"] for one in sorted(found, key=lambda one: one["client"])])
        return result


def client_app(network: str, path: str) -> ClientApp:
    """Returns a client that trains what it receives on its own batches."""
    app = ClientApp()

    @app.train()
    def train_client(message: Message, context: Context) -> Message:
        model, clients = load_once(network, path)
        number = int(context.node_config["partition-id"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loss = train(model, clients[number])
        metrics = {"num-examples": clients[number][1].numel(), "client": number, "loss": loss}
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
        return Message(content=RecordDict(content), reply_to=message)

    return app


def main(network: str, path: str) -> None:
    """Starts the simulation, which ends when no more rounds are asked for."""
    server, app = ServerApp(), client_app(network, path)
    count = len(read(path)[0]["label"])

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        model, _ = load(network, path)
        strategy = Asked(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
        say("ready")
        try:
            strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=ROUNDS)
        except Over:
            return

    run_simulation(
        server,
        app,
        num_supernodes=count,
        backend_config={"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
