"""Batch normalization whose statistics are a choice: one module, one file an idea."""

from fedjax_bn.normalization.batch_norm import (
    BatchNorm,
    StatisticsRule,
    batch_statistics,
    normalize_with,
    running_statistics,
)

__all__ = [
    "BatchNorm",
    "StatisticsRule",
    "batch_statistics",
    "normalize_with",
    "running_statistics",
]
