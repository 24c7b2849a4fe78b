"""Times PyTorch's loop over clients on the same device, in a process of its own.

    python -m on_accelerator.torch_case '["digit_cnn", 5, "float32", false]' 10

FedAvg: every client starts from the server's tensors, makes the same steps of plain SGD on batches
that are on the device, and the models are averaged there. Eager and compiled (`torch.compile`),
each with images channels first and channels last. TF32 is allowed in matrix products too, as JAX
does. The last line is JSON.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from in_torch import torch_models  # which puts the networks on the path
from on_accelerator.timing import figures, repeat
from on_accelerator.work import TorchCase, task_of
from tasks import LEARNING_RATE, Task, make_batches

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def measure(case: TorchCase, seconds: float) -> dict[str, Any]:
    """All settings in turn; `seconds` is for each."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    task, settings = task_of(case), {}
    for mode in ("eager",) if case.small else ("eager", "compiled"):
        for layout in LAYOUTS:
            run = round_at(task, case.dtype, mode, layout)
            settings[f"{mode}, {layout}"] = figures(repeat(run, seconds), task)
    best = min(settings, key=lambda name: settings[name]["round_seconds"])
    return {"best": best, **settings[best], "settings": settings, **_memory()}


def round_at(task: Task, dtype: str, mode: str, layout: str) -> Callable[[], None]:
    """A round: copy, train, add up; then the mean becomes the server's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = {"device": device, "dtype": getattr(torch, dtype)}
    model = network(task.name).to(**where, memory_format=LAYOUTS[layout]).train()
    tensors = list(model.state_dict().values())
    server = [tensor.clone() for tensor in tensors]
    loss = _loss(model)
    loss = torch.compile(loss) if mode == "compiled" else loss
    data = _on_device(task, device, LAYOUTS[layout])

    def run() -> None:
        total = [torch.zeros_like(tensor) for tensor in server]
        for images, labels in data:
            with torch.no_grad():
                torch._foreach_copy_(tensors, server)
            _train(model, loss, images, labels, where["dtype"])
            with torch.no_grad():
                torch._foreach_add_(total, tensors)
        for mean, tensor in zip(server, total, strict=True):
            mean.copy_(tensor / task.clients)
        if device == "cuda":
            torch.cuda.synchronize()

    return run


class SmallCNN(torch.nn.Module):
    """The network of that name, in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for inputs, width in ((3, 16), (16, 32), (32, 64)):
            convolution = torch.nn.Conv2d(inputs, width, 3, 2, 1, bias=False)
            layers += [convolution, torch.nn.BatchNorm2d(width), torch.nn.ReLU()]
        self.body, self.head = torch.nn.Sequential(*layers), torch.nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and logits."""
        features = self.body(images).mean((2, 3))
        return features, self.head(features)


def network(name: str) -> torch.nn.Module:
    """PyTorch's module of a task's name."""
    if name == "DigitCNN":
        return torch_models.DigitCNN()
    if name == "SmallCNN":
        return SmallCNN()
    if name == "ResNet10":
        return torch_models.ResNet(torch_models.BasicBlock, (1, 1, 1, 1), width=8)
    return torch_models.ResNet(torch_models.BasicBlock, (2, 2, 2, 2))


def _loss(model: torch.nn.Module) -> Loss:
    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        _, logits = model(images)
        return torch.nn.functional.cross_entropy(logits, labels)

    return loss


def _train(
    model: torch.nn.Module,
    loss: Loss,
    images: torch.Tensor,
    labels: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Plain SGD, one step a batch."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, foreach=True)
    for x, y in zip(images, labels, strict=True):
        optimizer.zero_grad()
        loss((x.to(dtype) / 255 - 0.5) / 0.5, y).backward()
        optimizer.step()


def _on_device(task: Task, device: str, layout: torch.memory_format) -> list[Any]:
    """Of each client, the batches of images u8[S, B, 3, H, W] and labels i64[S, B]."""
    arrays = make_batches(task)
    clients = []
    for image, label in zip(arrays["image"], arrays["label"], strict=True):
        images = torch.from_numpy(image).to(device).permute(0, 1, 4, 2, 3)
        batches = [batch.contiguous(memory_format=layout) for batch in images]
        clients.append((batches, torch.from_numpy(label).long().to(device)))
    return clients


def _memory() -> dict[str, float | None]:
    """Megabytes at the peak, of all settings."""
    if not torch.cuda.is_available():
        return {"peak_megabytes": None}
    return {"peak_megabytes": torch.cuda.max_memory_allocated() / 1e6}


if __name__ == "__main__":
    print(json.dumps(measure(TorchCase(*json.loads(sys.argv[1])), float(sys.argv[2]))))
