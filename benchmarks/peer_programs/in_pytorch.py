"""Runs a plain loop over clients in PyTorch; Flower and pfl-research use its network and steps.

python -m peer_programs.in_pytorch NETWORK FILE            # the loop
python -m peer_programs.in_pytorch NETWORK FILE --draw     # adds the network's first tensors
"""

import copy
import functools
import sys
from pathlib import Path

import numpy as np
import torch

from peer_programs.rounds import LEARNING_RATE, read, serve, write

# This folder has the definitions of the networks.
sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

import torch_models

Client = tuple[torch.Tensor, torch.Tensor]  # u8[S, B, 3, H, W], i64[S, B]


def new_network(name: str) -> torch.nn.Module:
    """Returns DigitCNN or ResNet18."""
    if name == "DigitCNN":
        return torch_models.DigitCNN()
    return torch_models.ResNet(torch_models.BasicBlock, (2, 2, 2, 2))


def load(name: str, path: str) -> tuple[torch.nn.Module, list[Client]]:
    """Returns the network with its first tensors, and the clients' batches."""
    arrays, tensors = read(path)
    model = new_network(name)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    images = np.ascontiguousarray(arrays["image"].transpose(0, 1, 2, 5, 3, 4))
    labels = torch.from_numpy(arrays["label"]).long()
    return model.train(), list(zip(torch.from_numpy(images), labels, strict=True))


@functools.cache
def load_once(name: str, path: str) -> tuple[torch.nn.Module, list[Client]]:
    """Returns the result of `load`, which runs once in each process."""
    return load(name, path)


def loss_of(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of a batch of bytes."""
    _, logits = model((images.float() / 255 - 0.5) / 0.5)
    return torch.nn.functional.cross_entropy(logits, labels)


def train(model: torch.nn.Module, client: Client) -> float:
    """Makes one step of plain SGD for each batch, in place; returns the mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses = []
    for images, labels in zip(*client, strict=True):
        optimizer.zero_grad()
        loss = loss_of(model, images, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def main(network: str, path: str) -> None:
    """Trains a copy of the server's model for each client, and averages all tensors."""
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
    if sys.argv[3:] == ["--draw"]:
        torch.manual_seed(0)
        drawn = {name: t.numpy() for name, t in new_network(sys.argv[1]).state_dict().items()}
        write(Path(sys.argv[2]), read(sys.argv[2])[0], drawn)
    else:
        main(*sys.argv[1:])
