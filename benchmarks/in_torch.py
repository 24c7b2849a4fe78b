"""PyTorch's side: the same round and evaluation in eager mode, at each of its settings."""

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from machine import CORES
from tasks import LEARNING_RATE, Task, make_batches, make_test_images

# The definitions of the networks are there.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import torch_models

Client = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Setting(NamedTuple):
    """How PyTorch runs."""

    threads: int
    channels_last: bool

    def __str__(self) -> str:
        """As tables name it."""
        layout = "channels_last" if self.channels_last else "contiguous"
        return f"PyTorch, {self.threads} thread{'s' * (self.threads > 1)}, {layout}"

    @property
    def layout(self) -> torch.memory_format:
        """The order of an image's axes in memory."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


SETTINGS = [Setting(n, last) for n in sorted({1, CORES}) for last in (False, True)]


def network(task: Task) -> torch.nn.Module:
    """PyTorch's module for a task; its forward returns (features, logits)."""
    if task.name == "DigitCNN":
        return torch_models.DigitCNN()
    return torch_models.ResNet(torch_models.BasicBlock, (2, 2, 2, 2))


def rounds(task: Task) -> dict[str, Callable[[], None]]:
    """A round at each setting."""
    return {str(setting): round_at(setting, task) for setting in SETTINGS}


def evaluations(
    task: Task, images: int, batches: Sequence[int]
) -> dict[int, dict[str, Callable[[], None]]]:
    """Accuracy at each setting, by the size of its batches."""
    return {
        size: {f"{at}, batch {size}": evaluation_at(at, task, images, size) for at in SETTINGS}
        for size in batches
    }


def round_at(setting: Setting, task: Task) -> Callable[[], None]:
    """A loop over clients, each from a copy of the server's model; then plain averaging."""
    server = network(task).to(memory_format=setting.layout)
    data = in_layout(task, setting.layout)

    def run() -> None:
        torch.set_num_threads(setting.threads)
        trained = [train(server, client) for client in data]
        with torch.no_grad():
            for name, value in server.state_dict().items():
                value.copy_(torch.stack([one[name].float() for one in trained]).mean(0))

    return run


def in_layout(task: Task, layout: torch.memory_format) -> list[Client]:
    """The task's batches by client, short ones without their padding."""
    arrays = make_batches(task)
    images = torch.from_numpy(arrays["image"]).permute(0, 1, 2, 5, 3, 4)
    labels = torch.from_numpy(arrays["label"]).long()
    counts = arrays["valid"].sum(2)
    return [
        [
            (images[k, s, :n].contiguous(memory_format=layout), labels[k, s, :n])
            for s, n in enumerate(counts[k])
        ]
        for k in range(task.clients)
    ]


def train(server: torch.nn.Module, client: Client) -> dict[str, torch.Tensor]:
    """One client's local training; returns the trained model's tensors."""
    model = copy.deepcopy(server).train()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for x, y in client:
        optimizer.zero_grad()
        _, logits = model((x.float() / 255 - 0.5) / 0.5)
        torch.nn.functional.cross_entropy(logits, y).backward()
        optimizer.step()
    return model.state_dict()


def evaluation_at(setting: Setting, task: Task, images: int, batch: int) -> Callable[[], None]:
    """Accuracy in inference mode."""
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
