"""Lists what is compiled for a GPU: networks, methods, mappings of clients, dtypes."""

from typing import NamedTuple

from on_tpu.cases import MODELS as ON_TPU
from on_tpu.cases import Size

MODELS = {
    **ON_TPU,
    "DigitCNN": Size(50, 64, 28, steps=12),  # as in `accelerator.py`
    "UNet": Size(4, 16, 128),
}
# All variables in bfloat16; layers that compute in it with float32 parameters; float32 throughout,
# whose products have TF32.
DTYPES = ("bfloat16", "mixed", "float32")


class Case(NamedTuple):
    """One program to compile."""

    model: str  # a network of `MODELS`
    method: str  # of `fedjax_bn.methods` or `fedjax_bn.contrib`
    clients: str  # how clients are mapped: `auto`, `map`, `vmap` or `vmap:at_once=n`
    dtype: str  # of `DTYPES`

    @property
    def name(self) -> str:
        """Returns the name of the case in the record."""
        return f"{self.model} {self.program}"

    @property
    def program(self) -> str:
        """Returns the name of the case in the table of its network."""
        return f"{self.method} {self.clients} {self.dtype}"


TABLE = tuple(
    Case(model, "fedbn", "map", dtype)
    for model in ("ResNet18", "DigitCNN", "UNet", "DenseNet121")
    for dtype in ("bfloat16", "float32")
)
