"""Times PyTorch's loop over clients: python -m on_accelerator.torch_case CASE SECONDS.

The round is FedAvg: every client starts from the server's tensors and makes the same steps of plain
SGD; batches are on the device, and the models are averaged there. It runs eager and compiled
(`torch.compile`), each with images channels first and channels last. TF32 is allowed in matrix
products too, as in JAX. The last line is JSON.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from in_torch import network
from on_accelerator.cases import Case, repeat, task_of, wait_for_turn
from tasks import LEARNING_RATE, Task, make_batches

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def measure(case: Case, seconds: float, wait: Callable[[], None]) -> dict[str, Any]:
    """Compiles all settings, waits, and times them one after another, for `seconds` each."""
    # JAX multiplies float32 in TF32 by default, PyTorch only on request
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    task = task_of(case)
    rounds = {
        f"{mode}, {layout}": round_at(task, case.dtype, mode, layout)
        for mode in (("eager",) if case.small else ("eager", "compiled"))
        for layout in LAYOUTS
    }
    for run in rounds.values():
        run()
    wait()
    settings = {name: repeat(run, seconds, task) for name, run in rounds.items()}
    best = min(settings, key=lambda name: settings[name]["round_seconds"])
    peak = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else None
    return {"best": best, **settings[best], "settings": settings, "peak_megabytes": peak}


def round_at(task: Task, dtype: str, mode: str, layout: str) -> Callable[[], None]:
    """Returns a round, which trains a copy for each client and averages into the server's model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = {"device": device, "dtype": getattr(torch, dtype)}
    model = network(task).to(**where, memory_format=LAYOUTS[layout]).train()
    tensors = list(model.state_dict().values())
    server = [tensor.clone() for tensor in tensors]
    arrays, data = make_batches(task), []
    for image, label in zip(arrays["image"], arrays["label"], strict=True):
        images = torch.from_numpy(image).to(device).permute(0, 1, 4, 2, 3)
        batches = [batch.contiguous(memory_format=LAYOUTS[layout]) for batch in images]
        data.append((batches, torch.from_numpy(label).long().to(device)))

    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        _, logits = model(images)
        return torch.nn.functional.cross_entropy(logits, labels)

    loss_of = torch.compile(loss_of) if mode == "compiled" else loss_of

    def run() -> None:
        total = [torch.zeros_like(tensor) for tensor in server]
        for images, labels in data:
            with torch.no_grad():
                torch._foreach_copy_(tensors, server)
            optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, foreach=True)
            for x, y in zip(images, labels, strict=True):
                optimizer.zero_grad()
                loss_of((x.to(where["dtype"]) / 255 - 0.5) / 0.5, y).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, tensors)
        for mean, tensor in zip(server, total, strict=True):
            mean.copy_(tensor / task.clients)
        if device == "cuda":
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    print(json.dumps(measure(Case(*json.loads(sys.argv[1])), float(sys.argv[2]), wait_for_turn)))
