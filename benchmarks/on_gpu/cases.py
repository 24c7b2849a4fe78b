"""Lists what is compiled for a GPU: networks, methods, mappings of clients, dtypes."""

from typing import NamedTuple

from on_tpu.cases import MODELS as ON_TPU
from on_tpu.cases import Size

MODELS = {
    **ON_TPU,
    "DigitCNN": Size(50, 64, 28, steps=12),  # as in `accelerator.py`
    "UNet": Size(4, 16, 128),
}
DTYPES = ("bfloat16", "float32")  # of all variables; products of float32 are in TF32


class Case(NamedTuple):
    """One program to compile."""

    model: str  # a network of `MODELS`
    method: str  # of `fedjax_bn.methods` or `fedjax_bn.contrib`
    clients: str  # how clients are mapped: `auto`, `map`, `vmap` or `vmap:at_once=n`
    dtype: str  # of `DTYPES`

    @property
    def name(self) -> str:
        """Returns the name of the case in the record and the table."""
        return " ".join(self)


TABLE = tuple(
    Case(model, "fedbn", "map", dtype)
    for model in ("ResNet18", "DigitCNN", "UNet", "DenseNet121")
    for dtype in DTYPES
)
