"""How fast known chips can be at most: only those whose figures we have read.

H100 SXM and H200: NVIDIA's as tabulated at glennklockwood.com/garden/processors/h100. A100, L4,
L40S, T4, V100: NVIDIA's as listed by dealers and catalogues of GPUs (seen 2026-11). All are for
tensor cores without sparsity. TPU v5e and v6e: docs.cloud.google.com/tpu/docs/v5e and v6e. Check a
figure in the maker's own data sheet before you rest a claim on it, and add your chip's.
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
    "NVIDIA H200": Peak(989.4, 494.7),
    "NVIDIA H200 NVL": Peak(None, None),  # slower; not read
    "NVIDIA A100": Peak(312.0, 156.0),
    "NVIDIA L4": Peak(121.0, 60.0),
    "NVIDIA L40S": Peak(362.0, 183.0),
    "Tesla T4": Peak(None, 8.1),
    "Tesla V100-SXM2": Peak(None, 15.7),
    "TPU v5 lite": Peak(197.0, None),
    "TPU v5e": Peak(197.0, None),
    "TPU v6 lite": Peak(918.0, None),
    "TPU v6e": Peak(918.0, None),
}
UNKNOWN = Peak(None, None)


def peak_of(kind: str) -> Peak:
    """The peak of a device kind; `UNKNOWN` where the table has none.

    A longer word is another chip: an L40S is neither an L40 nor an L4.
    """
    fits = [name for name in PEAKS if f"{kind} ".startswith((f"{name} ", f"{name}-"))]
    return PEAKS[max(fits, key=len)] if fits else UNKNOWN
