"""Runs the same round and evaluation in PyTorch's eager mode, at each of its settings."""

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from machine import CORES
from tasks import LEARNING_RATE, Task, make_batches, make_test_images

# This folder has the definitions of the networks.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import torch_models


class Setting(NamedTuple):
    """A setting of PyTorch: its threads, and the order of an image's axes."""

    threads: int
    channels_last: bool

    def __str__(self) -> str:
        """Returns the setting's name in tables."""
        layout = "channels_last" if self.channels_last else "contiguous"
        return f"PyTorch, {self.threads} thread{'s' * (self.threads > 1)}, {layout}"

    @property
    def layout(self) -> torch.memory_format:
        """Returns the order of an image's axes in memory."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


SETTINGS = [Setting(n, last) for n in sorted({1, CORES}) for last in (False, True)]


def network(task: Task) -> torch.nn.Module:
    """Returns PyTorch's module for a task, whose forward pass gives (features, logits)."""
    if task.name == "DigitCNN":
        return torch_models.DigitCNN()
    if task.name == "UNet":
        return torch_models.UNet(2, 16, 3)
    return torch_models.ResNet(torch_models.BasicBlock, (2, 2, 2, 2))


def tensors(task: Task) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Returns images [K, S, B, 3, side, side], labels i64[K, S, B, ...] and valid bool[K, S, B]."""
    arrays = make_batches(task)
    label = arrays["label"]["mask"] if task.name == "UNet" else arrays["label"]
    images = torch.from_numpy(arrays["image"]).permute(0, 1, 2, 5, 3, 4)
    return images, torch.from_numpy(label).long(), arrays["valid"]


def loss_of(task: Task, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy, in segmentation its mean with the soft Dice loss of class 1."""
    entropy = torch.nn.functional.cross_entropy(logits, y)
    if task.name != "UNet":
        return entropy
    truth = torch.nn.functional.one_hot(y, 2).movedim(-1, 1)
    p = logits.softmax(1)
    both, either = (p * truth).sum((0, 2, 3)), (p + truth).sum((0, 2, 3))
    return (entropy + 1 - ((2 * both + 1e-5) / (either + 1e-5))[1]) / 2


def evaluations(
    task: Task, images: int, batches: Sequence[int]
) -> dict[int, dict[str, Callable[[], None]]]:
    """Returns batch size -> name -> a call of the evaluation at each setting."""
    return {
        size: {f"{at}, batch {size}": evaluation_at(at, task, images, size) for at in SETTINGS}
        for size in batches
    }


def rounds(task: Task) -> dict[str, Callable[[], None]]:
    """Returns name -> a call of a round at each setting; short batches have no padding."""
    (images, labels, valid), runs = tensors(task), {}

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        _, logits = model((x.float() / 255 - 0.5) / 0.5)
        return loss_of(task, logits, y)

    for setting in SETTINGS:
        clients = [
            [
                (images[k, s, :n].contiguous(memory_format=setting.layout), labels[k, s, :n])
                for s, n in enumerate(valid.sum(2)[k])
            ]
            for k in range(task.clients)
        ]
        runs[str(setting)] = round_of(setting, network(task), clients, loss, LEARNING_RATE)
    return runs


def round_of(
    setting: Setting,
    server: torch.nn.Module,
    clients: Sequence[Sequence[tuple]],
    loss: Callable[..., torch.Tensor],
    rate: float,
) -> Callable[[], None]:
    """Returns a loop over clients, each from a copy of the server's model; then plain averaging.

    Each makes a step of plain SGD for each of its batches by `loss(model, *batch)`.
    """
    server = server.to(memory_format=setting.layout)

    def run() -> None:
        torch.set_num_threads(setting.threads)
        trained = []
        for batches in clients:
            model = copy.deepcopy(server).train()
            optimizer = torch.optim.SGD(model.parameters(), rate)
            for batch in batches:
                optimizer.zero_grad()
                loss(model, *batch).backward()
                optimizer.step()
            trained.append(model.state_dict())
        with torch.no_grad():
            for name, value in server.state_dict().items():
                value.copy_(torch.stack([one[name].float() for one in trained]).mean(0))

    return run


def evaluation_at(setting: Setting, task: Task, images: int, batch: int) -> Callable[[], None]:
    """Returns a call that computes accuracy in inference mode."""
    model = network(task).to(memory_format=setting.layout).eval()
    pixels, labels = map(torch.from_numpy, make_test_images(task, images))
    pixels = pixels.permute(0, 3, 1, 2).contiguous(memory_format=setting.layout)

    def run() -> None:
        torch.set_num_threads(setting.threads)
        right = 0
        with torch.inference_mode():
            for i in range(0, images, batch):
                _, logits = model((pixels[i : i + batch].float() / 255 - 0.5) / 0.5)
                right += (logits.argmax(1) == labels[i : i + batch]).sum()
        right.item()

    return run
