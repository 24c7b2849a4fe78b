"""How fast known chips can be at most, from their makers' data sheets.

NVIDIA: the data sheets of H100, H200, GH200, A100, A10, L4, L40S, T4 and V100 (tensor cores without
sparsity). Google: the pages "TPU v2" to "TPU v6e" of the Cloud TPU documentation, where JAX has
one device a core (v2, v3) half of a chip's.
"""

from typing import NamedTuple


class Peak(NamedTuple):
    """Teraflop/s, a multiplication and an addition being two; None where the maker names none.

    Attributes:
      bfloat16: matrix units.
      float32: what float32 runs on by default in JAX: matrix units in TF32 where a GPU has them,
        else its ordinary units. A TPU's default is one pass in bfloat16, and no other is named.
    """

    bfloat16: float | None
    float32: float | None


# Beginning of JAX's `device_kind` -> peak; the longest that fits counts.
PEAKS = {
    "NVIDIA H100 80GB HBM3": Peak(989.4, 494.7),
    "NVIDIA H100 PCIe": Peak(756.0, 378.0),
    "NVIDIA H100 NVL": Peak(835.0, 417.5),
    "NVIDIA H200": Peak(989.4, 494.7),
    "NVIDIA H200 NVL": Peak(835.5, 417.5),
    "NVIDIA GH200": Peak(989.4, 494.7),
    "NVIDIA A100": Peak(312.0, 156.0),
    "NVIDIA A10": Peak(125.0, 62.5),
    "NVIDIA L4": Peak(121.0, 60.0),
    "NVIDIA L40S": Peak(362.0, 183.0),
    "Tesla T4": Peak(None, 8.1),
    "Tesla V100": Peak(None, 15.7),
    "TPU v2": Peak(22.5, None),
    "TPU v3": Peak(61.5, None),
    "TPU v4": Peak(275.0, None),
    "TPU v5 lite": Peak(197.0, None),
    "TPU v5e": Peak(197.0, None),
    "TPU v5": Peak(459.0, None),
    "TPU v5p": Peak(459.0, None),
    "TPU v6 lite": Peak(918.0, None),
    "TPU v6e": Peak(918.0, None),
}
UNKNOWN = Peak(None, None)


def peak_of(kind: str) -> Peak:
    """The peak of a device kind; `UNKNOWN` where the table has none.

    A longer word is another chip: an A10G is no A10.
    """
    fits = [name for name in PEAKS if f"{kind} ".startswith((f"{name} ", f"{name}-"))]
    return PEAKS[max(fits, key=len)] if fits else UNKNOWN
