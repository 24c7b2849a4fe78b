"""Runs pfl-research's simulation: python -m peer_programs.pfl_research NETWORK FILE.

It uses pfl's own FederatedAveraging in one process, clients one after another. pfl averages
parameters; it neither resets nor averages batch norm's running statistics, which training does not
read.
"""

import sys
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

from peer_programs.in_pytorch import load, loss_of
from peer_programs.rounds import LEARNING_RATE, say, told

ROUNDS = 1_000_000  # an upper limit; the program ends when no more rounds are asked for


class Network(torch.nn.Module):
    """A network with the methods that pfl needs, `loss` and `metrics`; keeps training losses."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.losses = model, []

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss of one step of training."""
        loss = loss_of(self.model, images, labels)
        self.losses.append(loss.detach().clone())  # pfl divides it in place
        return loss

    def metrics(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Returns metrics; pfl calls this only in the first round, which is not timed."""
        with torch.no_grad():
            return {"loss": Weighted(float(loss_of(self.model, images, labels)), 1)}


class Asked(TrainingProcessCallback):
    """Prints each client's loss after a round, and waits until the next round is asked for."""

    def __init__(self, network: Network, clients: int) -> None:
        self.network, self.clients = network, clients

    def on_train_begin(self, *, model: Any) -> Metrics:
        """Waits until the first round is asked for."""
        say("ready")
        told()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Prints the losses; returns whether to stop, and empty metrics."""
        losses = torch.stack(self.network.losses).reshape(self.clients, -1).mean(1)
        self.network.losses.clear()
        say(losses.tolist())
        return not told(), Metrics()


def main(network: str, path: str) -> None:
    """Runs pfl's algorithm on its backend, with all clients in every round."""
    model, clients = load(network, path)
    net, (_, batch) = Network(model), clients[0][1].shape

    def dataset(k: int) -> Dataset:
        images, labels = clients[k]
        return Dataset([images.flatten(0, 1), labels.flatten()], user_id=str(k))

    # a cohort has as many users as there are clients, so each client trains once in a round
    sampler = get_user_sampler("minimize_reuse", list(range(len(clients))))
    backend = SimulatedBackend(FederatedDataset(dataset, sampler), val_data=None)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS,
            evaluation_frequency=ROUNDS,
            train_cohort_size=len(clients),
            val_cohort_size=None,
        ),
        backend,
        PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=batch
        ),
        NNEvalHyperParams(local_batch_size=batch),
        [Asked(net, len(clients))],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
