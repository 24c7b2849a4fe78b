"""Lists what is compiled for a TPU: networks, methods, mappings of clients, dtypes, devices."""

from typing import NamedTuple

STEPS = 4  # of a client in a round on a TPU
# Takes the place of a method: the convolutions and matrix products of FedBN's step alone.
PRODUCTS = "products"


class Size(NamedTuple):
    """The sizes of a network's round: clients, samples of a batch, pixels a side, local steps."""

    clients: int
    batch: int
    side: int
    steps: int = STEPS


MODELS = {
    "SmallCNN": Size(8, 32, 28),
    "DigitCNN": Size(5, 32, 28),
    "ResNet18": Size(3, 64, 224),
    "AlexNet": Size(4, 32, 256),
    "DenseNet121": Size(4, 32, 96),
    "YOLOv5n": Size(4, 32, 320),
}


class Case(NamedTuple):
    """One program to compile."""

    model: str  # a network of `MODELS`
    method: str  # of `fedjax_bn.methods`, or `PRODUCTS`
    clients: str  # how each device maps its clients: `auto`, `map`, `vmap` or `vmap:at_once=n`
    dtype: str  # in which the network computes; parameters are float32
    devices: int  # over which the clients are spread

    @property
    def name(self) -> str:
        """Returns the name of the case in the record."""
        return f"{self.model} {self.program}"

    @property
    def program(self) -> str:
        """Returns the name of the case in the table of its network."""
        devices = "1 device" if self.devices == 1 else f"{self.devices} devices"
        return f"{self.method} {self.clients} {self.dtype}, {devices}"


# On one chip each way to map clients, on four the one that the library chooses.
MAPPINGS = (("map", 1), ("vmap", 1), ("vmap:at_once=2", 1), ("auto", 4))
FIRST = ("DigitCNN", "ResNet18")  # the networks with all methods of the table
TABLE = tuple(
    Case(model, method, clients, dtype, devices)
    for method, dtype, models in (
        ("fedbn", "bfloat16", tuple(MODELS)),
        *((method, "bfloat16", FIRST) for method in ("fedavg", "fediga", "fedcd")),
        ("fedbn", "float32", tuple(MODELS)),
    )
    for model in models
    for clients, devices in MAPPINGS
) + tuple(Case(model, PRODUCTS, "map", "bfloat16", 1) for model in FIRST)
