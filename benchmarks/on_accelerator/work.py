"""What is timed on an accelerator: networks, clients, methods, ways to map clients, dtypes."""

from collections.abc import Iterator
from typing import NamedTuple

import tasks
from fedjax_bn.models import ResNet10, SmallCNN

BATCH = 64
METHODS = ("fedavg", "fedbn", "fediga")
DTYPES = ("float32", "bfloat16")


class Case(NamedTuple):
    """One program to time.

    Attributes:
      part: `digit_cnn` or `resnet18`.
      num_clients: K.
      method: of `fedjax_bn.methods`.
      clients: how they are mapped: `map`, `vmap` or `vmap:n`.
      dtype: of all variables and images.
      small: whether sizes are such that a CPU has seconds to do.
    """

    part: str
    num_clients: int
    method: str
    clients: str
    dtype: str
    small: bool = False

    @property
    def name(self) -> str:
        """As the JSON and the table have it."""
        return f"K={self.num_clients} {self.method} {self.clients} {self.dtype}"


class TorchCase(NamedTuple):
    """PyTorch's loop over the clients of FedAvg, at each of its settings.

    Attributes:
      part, num_clients, dtype, small: as of `Case`.
    """

    part: str
    num_clients: int
    dtype: str
    small: bool = False

    @property
    def name(self) -> str:
        """As the JSON and the table have it."""
        return f"K={self.num_clients} PyTorch {self.dtype}"


# part -> {K: n of vmap:n}; 2 of 3 and 3 of 5 leave a remainder, as a user's n will.
CLIENTS = {"digit_cnn": {5: 3, 50: 10}, "resnet18": {3: 2, 30: 6}}


def cases(part: str, small: bool = False) -> list[Case]:
    """All cases of a part, those that say most first: what is last may not fit the time."""
    if small:
        return _small_cases(part)
    return list(_ordered(part))


def _ordered(part: str) -> Iterator[Case]:
    for dtype in DTYPES:
        for method in METHODS:
            for num_clients, some in CLIENTS[part].items():
                for clients in ("vmap", "map", f"vmap:{some}"):
                    yield Case(part, num_clients, method, clients, dtype)


def _small_cases(part: str) -> list[Case]:
    chosen = {
        "digit_cnn": [
            ("fedavg", "map", "float32"),
            ("fedbn", "vmap", "bfloat16"),
            ("fediga", "vmap:1", "float32"),
        ],
        "resnet18": [("fedavg", "vmap:1", "float32")],
    }
    return [Case(part, 2, *one, small=True) for one in chosen[part]]


def torch_cases(part: str, small: bool = False) -> list[TorchCase]:
    """PyTorch's counterparts of a part."""
    counts = [2] if small else CLIENTS[part]
    dtypes = DTYPES[:1] if small else DTYPES
    return [TorchCase(part, k, dtype, small) for dtype in dtypes for k in counts]


def task_of(case: Case | TorchCase) -> tasks.Task:
    """The round: 12 steps of DigitCNN on 28x28 pixels, 4 of ResNet18 on 224x224; batches of 64."""
    if case.part == "digit_cnn":
        task = tasks.DIGITS._replace(samples=12 * BATCH, batch=BATCH)
    else:
        task = tasks.RESNET._replace(side=224, samples=4 * BATCH, batch=BATCH)
    if case.small:
        task = task._replace(samples=4, batch=2)
    if case.small and case.part == "digit_cnn":
        task = task._replace(name="SmallCNN", model=SmallCNN())
    if case.small and case.part == "resnet18":
        task = task._replace(name="ResNet10", model=ResNet10(num_classes=10, width=8), side=32)
    return task._replace(clients=case.num_clients)
