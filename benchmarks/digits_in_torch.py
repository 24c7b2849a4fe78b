"""Trains FedBN and FedAvg on digits in PyTorch alone, to compare accuracies with this library's.

    python benchmarks/digits_in_torch.py --path digits.npz [--rounds 30] [--seeds 3]

The data, the network and the steps are those of configs/digits.py: a client for each domain, an
epoch a round in batches of 32, SGD 0.01, plain averaging; FedBN keeps batch norms. The random
weights and orders are PyTorch's and NumPy's. It prints the test accuracy of each client's model
after the last round, mean (standard deviation over seeds) in percent.
"""

import argparse
import copy
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from torch_models import DigitCNN

DOMAINS = ("mnist", "svhn", "usps", "fonts", "mnist_m")
BATCH, RATE = 32, 0.01


def tensors(archive: dict, domain: str, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images in [-1, 1], f[N, 3, 28, 28], and labels i[N] of a part of a domain."""
    images, labels = (archive[f"{domain}__{part}_{kind}"] for kind in ("images", "labels"))
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    return (pixels / 255 - 0.5) / 0.5, torch.from_numpy(labels).long()


def epoch(model: DigitCNN, images: torch.Tensor, labels: torch.Tensor, order: np.ndarray) -> None:
    """Trains a model on all samples once."""
    optimizer = torch.optim.SGD(model.train().parameters(), RATE)
    for start in range(0, len(order), BATCH):
        index = torch.from_numpy(order[start : start + BATCH])
        optimizer.zero_grad()
        functional.cross_entropy(model(images[index])[1], labels[index]).backward()
        optimizer.step()


@torch.no_grad()
def average(models: list[DigitCNN], keeps_norms: bool) -> None:
    """Gives all models the mean of their values, without batch norms if they are kept."""
    states = [model.state_dict() for model in models]
    for name, value in states[0].items():
        if value.is_floating_point() and not (keeps_norms and name.startswith("bn")):
            mean = torch.stack([state[name] for state in states]).mean(0)
            for state in states:
                state[name].copy_(mean)


@torch.no_grad()
def accuracy(model: DigitCNN, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the share of right answers in percent."""
    answers = [model.eval()(part)[1].argmax(1) for part in images.split(500)]
    return 100 * (torch.cat(answers) == labels).float().mean().item()


def main() -> None:
    """Trains both methods with every seed and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    with np.load(options.path) as archive:
        train, test = (
            [tensors(archive, domain, part) for domain in DOMAINS] for part in ("train", "test")
        )
    print("| PyTorch | " + " | ".join([*DOMAINS, "mean"]) + " |")
    for method in ("FedBN", "FedAvg"):
        rows = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            random, server = np.random.default_rng(seed), DigitCNN()
            models = [copy.deepcopy(server) for _ in DOMAINS]
            for _ in range(options.rounds):
                for model, (images, labels) in zip(models, train, strict=True):
                    epoch(model, images, labels, random.permutation(len(labels)))
                average(models, method == "FedBN")
            scores = [accuracy(model, *part) for model, part in zip(models, test, strict=True)]
            rows.append([*scores, np.mean(scores)])
        pairs = zip(np.mean(rows, 0), np.std(rows, 0, ddof=1), strict=True)
        cells = (f"{mean:.1f} ({deviation:.1f})" for mean, deviation in pairs)
        print("| " + " | ".join([method, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
