"""Batch normalization with exchangeable statistics rules over arrays, one file per rule."""

from fedjax_bn.normalization.batch_norm import BatchNorm
from fedjax_bn.normalization.calls import normalize_with
from fedjax_bn.normalization.layer import (
    Layer,
    Statistics,
    StatisticsRule,
    batch_statistics,
    running_statistics,
)

__all__ = ["BatchNorm", "Layer", "Statistics", "StatisticsRule"]
__all__ += ["batch_statistics", "normalize_with", "running_statistics"]
