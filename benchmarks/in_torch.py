"""Runs the same round and evaluation in PyTorch's eager mode, at each of its settings."""

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from machine import CORES
from tasks import CLASSES, LEARNING_RATE, Task, make_batches, make_test_images

# This folder has the definitions of the networks.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import torch_models
import torch_yolo


class Setting(NamedTuple):
    """A setting of PyTorch: clients at once, threads of each, and the order of an image's axes."""

    at_once: int
    threads: int
    channels_last: bool

    def __str__(self) -> str:
        """Returns the setting's name in tables."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        clients = f"{self.at_once} clients at once, {threads}" if self.at_once > 1 else threads
        return f"PyTorch, {clients}, {'channels_last' if self.channels_last else 'contiguous'}"

    @property
    def layout(self) -> torch.memory_format:
        """Returns the order of an image's axes in memory."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def map(self, work: Callable[[Any], Any], clients: Iterable[Any]) -> list[Any]:
        """Returns the results of `work(client)`, computed with the setting's threads."""

        def with_threads(client: Any) -> Any:
            torch.set_num_threads(self.threads)  # of the thread that calls it
            return work(client)

        if self.at_once == 1:
            return [with_threads(client) for client in clients]
        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(with_threads, clients))


def settings(num_clients: int, *, at_once: bool) -> list[Setting]:
    """Returns the settings in which clients train at once, in threads of Python, or in turn."""
    workers = min(num_clients, CORES) if at_once else 1
    if at_once and workers == 1:
        return []
    return [Setting(workers, CORES // workers, last) for last in (False, True)]


def network(task: Task) -> torch.nn.Module:
    """Returns PyTorch's module for a task; but for YOLO's its results are (features, logits)."""
    if task.name == "DigitCNN":
        return torch_models.DigitCNN()
    if task.name == "UNet":
        return torch_models.UNet(2, 16, 3)
    if task.name == "YOLOv5n":
        return torch_yolo.YOLOv5(CLASSES)
    return torch_models.ResNet(torch_models.BasicBlock, (2, 2, 2, 2))


def tensors(task: Task) -> tuple[torch.Tensor, list[torch.Tensor], np.ndarray]:
    """Returns images [K, S, B, 3, side, side], labels [K, S, B, ...] and valid bool[K, S, B]."""
    arrays = make_batches(task)
    label = arrays["label"]
    labels = map(torch.from_numpy, label.values() if isinstance(label, dict) else [label])
    images = torch.from_numpy(arrays["image"]).permute(0, 1, 2, 5, 3, 4)
    return images, [x if x.is_floating_point() else x.long() for x in labels], arrays["valid"]


def standardized(images: torch.Tensor) -> torch.Tensor:
    """Returns bytes as numbers in [-1, 1]."""
    return (images.float() / 255 - 0.5) / 0.5


def loss_of(task: Task, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy, in segmentation its mean with Dice's loss of the foreground."""
    entropy = functional.cross_entropy(logits, label)
    if task.name != "UNet":
        return entropy
    truth = functional.one_hot(label, 2).movedim(-1, 1)
    p = logits.softmax(1)
    overlap, sizes = (p * truth).sum((0, 2, 3)), (p + truth).sum((0, 2, 3))
    return (entropy + 1 - ((2 * overlap + 1e-5) / (sizes + 1e-5))[1]) / 2


def rounds(task: Task, settings: Iterable[Setting]) -> dict[str, Callable[[], None]]:
    """Returns name -> a call of a round at each setting; short batches have no padding."""
    (images, labels, valid), runs = tensors(task), {}

    def loss(model: Any, x: torch.Tensor, *label: torch.Tensor) -> torch.Tensor:
        if task.name == "YOLOv5n":
            return torch_yolo.detection_loss(model(x.float() / 255), *label)
        return loss_of(task, model(standardized(x))[1], *label)

    for setting in settings:
        clients = [
            [
                (
                    images[k, s, :n].contiguous(memory_format=setting.layout),
                    *(label[k, s, :n] for label in labels),
                )
                for s, n in enumerate(valid.sum(2)[k])
            ]
            for k in range(task.clients)
        ]
        runs[str(setting)] = round_of(setting, network(task), clients, loss)
    return runs


def round_of(
    setting: Setting,
    server: torch.nn.Module,
    clients: Sequence[Sequence[tuple]],
    loss: Callable[..., torch.Tensor],
) -> Callable[[], None]:
    """Returns the training of all clients, each from a copy of the server's; then plain averaging.

    Each makes a step of plain SGD for each of its batches by `loss(model, *batch)`.
    """
    server = server.to(memory_format=setting.layout)

    def train(batches: Sequence[tuple]) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(server).train()
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        for batch in batches:
            optimizer.zero_grad()
            loss(model, *batch).backward()
            optimizer.step()
        return model.state_dict()

    def run() -> None:
        trained = setting.map(train, clients)
        torch.set_num_threads(setting.at_once * setting.threads)
        with torch.no_grad():
            for name, value in server.state_dict().items():
                value.copy_(torch.stack([model[name].float() for model in trained]).mean(0))

    return run


def evaluations(
    task: Task, images: int, settings: Iterable[Setting]
) -> dict[str, Callable[[], object]]:
    """Returns name -> a call of the evaluation, for each setting and several sizes of a batch."""
    return {
        f"{setting}, batch {batch}": evaluation_at(setting, task, images, batch)
        for setting in settings
        for batch in (images // 10, images // 5)  # larger ones are slower
    }


def evaluation_at(setting: Setting, task: Task, images: int, batch: int) -> Callable[[], object]:
    """Returns a call that computes each client's accuracy in inference mode."""
    pixels, labels = map(torch.from_numpy, make_test_images(task, images))
    pixels = pixels.permute(0, 3, 1, 2).contiguous(memory_format=setting.layout)
    clients = [network(task).to(memory_format=setting.layout).eval() for _ in range(task.clients)]

    def score(model: torch.nn.Module) -> float:
        right = 0
        with torch.inference_mode():
            for i in range(0, images, batch):
                _, logits = model(standardized(pixels[i : i + batch]))
                right += (logits.argmax(1) == labels[i : i + batch]).sum()
        return right.item() / images

    return lambda: setting.map(score, clients)
