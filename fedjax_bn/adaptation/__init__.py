"""Test-time adaptation: how a client outside the federation predicts with the received model.

An adaptation is a pair of pure functions. Its carry passes from batch to batch of one client and
starts again for the next client. Those of `learning`, and T3A, learn from unlabelled images.
`model` is a linen module or `models.from_nnx` of an nnx module, images -> logits f[B, C], or
f[B, H, W, C] for segmentation. One without what an adaptation needs (batch norm that rules reach,
logits, one dense classifier) raises ValueError at `init` or `predict`. `precise_statistics` is for
internal clients.
"""

from fedjax_bn.adaptation.adaptation import (
    Adaptation,
    batch,
    ensemble,
    initial,
    running,
    stateless,
    tsmobn,
    with_clients,
    without_affine,
    without_mask,
    zero_shot_adapter,
)
from fedjax_bn.adaptation.instance import (
    fixed_alpha,
    iabn,
    learned_alpha,
    mixnorm,
    random_alpha,
    record_alphas,
    t3a,
)
from fedjax_bn.adaptation.learning import atp, learn_rates, sar, shot, tent
from fedjax_bn.adaptation.precise import precise_statistics

__all__ = [
    "Adaptation", "atp", "batch", "ensemble", "fixed_alpha", "iabn", "initial", "learn_rates",
    "learned_alpha", "mixnorm", "precise_statistics", "random_alpha", "record_alphas", "running",
    "sar", "shot", "stateless", "t3a", "tent", "tsmobn", "with_clients", "without_affine",
    "without_mask", "zero_shot_adapter",
]  # fmt: skip
