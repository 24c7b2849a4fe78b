"""A plain loop over clients in PyTorch: python -m peer_programs.plain_pytorch NETWORK FILE."""

import copy
import sys

import torch

from peer_programs.in_pytorch import load, train
from peer_programs.rounds import serve


def main(network: str, path: str) -> None:
    """Every client trains a copy of the server's model; then the mean of all tensors."""
    server, clients = load(network, path)

    def a_round() -> list[float]:
        losses, trained = [], []
        for client in clients:
            model = copy.deepcopy(server)
            losses.append(train(model, client))
            trained.append(model.state_dict())
        with torch.no_grad():
            for name, value in server.state_dict().items():
                value.copy_(torch.stack([one[name].float() for one in trained]).mean(0))
        return losses

    serve(a_round)


if __name__ == "__main__":
    main(*sys.argv[1:])
