"""Times PyTorch's loop over clients: python -m on_accelerator.torch_case CASE SECONDS.

The round is FedAvg: every client starts from the server's tensors and makes the same steps of plain
SGD; batches are on the device, and the models are averaged there. It runs with images channels
first and channels last, compiled only the latter. TF32 is allowed in matrix products too, as in
JAX. The last line is JSON.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from in_torch import loss_of, network, tensors
from on_accelerator.cases import Case, repeat, task_of, wait_for_turn
from tasks import LEARNING_RATE

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def measure(case: Case, seconds: float, wait: Callable[[], None]) -> dict[str, Any]:
    """Compiles all settings, waits, and times them one after another, for `seconds` each."""
    # JAX multiplies float32 in TF32 by default, PyTorch only on request
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    # `torch.compile` chooses the layout of convolutions itself
    layouts = LAYOUTS if case.clients in ("eager", "graph") else ("channels_last",)
    rounds = {layout: round_at(case, layout) for layout in layouts}
    for run in rounds.values():
        run()
    wait()
    settings = {name: repeat(run, seconds, task_of(case)) for name, run in rounds.items()}
    best = min(settings, key=lambda name: settings[name]["round_seconds"])
    peak = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else None
    return {"best": best, **settings[best], "settings": settings, "peak_megabytes": peak}


def round_at(case: Case, layout: str) -> Callable[[], None]:
    """Returns a round, which trains one model for each client and averages into the server's."""
    task, mode, order = task_of(case), case.clients, LAYOUTS[layout]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if case.dtype == "bfloat16" else torch.float32
    model = network(task).to(device=device, dtype=dtype, memory_format=order).train()
    parameters = list(model.parameters())
    # without the counts of batches, so that all tensors of a list have one dtype, which is faster
    trained = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    server = [tensor.clone() for tensor in trained]
    total = [torch.zeros_like(tensor) for tensor in server]
    images, (labels,), _ = tensors(task)
    data = [
        (
            [batch.to(device).contiguous(memory_format=order) for batch in client],
            list(label.to(device)),
        )
        for client, label in zip(images, labels, strict=True)
    ]
    mixed = case.dtype == "mixed"

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            _, logits = model((x.to(dtype) / 255 - 0.5) / 0.5)
            return loss_of(task, logits, y)

    if mode.startswith("compiled"):
        forward = torch.compile(forward)
    elif mode.startswith("autotune"):
        forward = torch.compile(forward, mode="max-autotune-no-cudagraphs")

    def run() -> None:
        torch._foreach_zero_(total)
        for batches, label in data:
            torch._foreach_copy_(trained, server)
            for x, y in zip(batches, label, strict=True):
                model.zero_grad()  # frees them
                forward(x, y).backward()
                gradients = [parameter.grad for parameter in parameters]
                with torch.no_grad():
                    torch._foreach_add_(parameters, gradients, alpha=-LEARNING_RATE)
            torch._foreach_add_(total, trained)
        torch._foreach_copy_(server, torch._foreach_div(total, task.clients))

    graph = captured(run) if mode.endswith("graph") else None

    def finish() -> None:
        # The graph does not hold the tensors that it reads and writes: `run` does.
        (graph.replay if graph else run)()
        if device == "cuda":
            torch.cuda.synchronize()

    return finish


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Returns the kernels of a call as one CUDA graph."""
    # Before the capture, calls compile and choose kernels, on another stream than the default one:
    # https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


if __name__ == "__main__":
    print(json.dumps(measure(Case(*json.loads(sys.argv[1])), float(sys.argv[2]), wait_for_turn)))
