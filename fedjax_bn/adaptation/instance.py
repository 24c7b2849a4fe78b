"""Rivals of the zero-shot adapter that mix a sample's own statistics in (FedIG, Table 3c)."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.adaptation.adaptation import Adaptation, stateless
from fedjax_bn.arguments.ranges import AtLeast0, Seed, UpTo1, bounded
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization.batch_instance import gated_statistics
from fedjax_bn.normalization.iabn import instance_aware_statistics
from fedjax_bn.normalization.mixig import random_weights, sample_mixed_statistics
from fedjax_bn.sharing import Variables


@bounded
def fixed_alpha(model: Any, alpha: UpTo1 | jax.Array = 0.5) -> Adaptation:
    """Eq. 7 with one alpha for all samples and layers; 0 is `running`, 1 instance normalization.

    After You et al. 2021 (Test-time batch statistics calibration for covariate shift). Differs
    from it: the sample's statistics are mixed in, not the batch's, as FedIG's comparison does.

    Args:
      model: as in `adaptation.stateless`, images -> logits.
      alpha: weight of the sample's own statistics, in [0, 1]; f[B] for one of each sample.
    """
    rule = sample_mixed_statistics(lambda layer, size, dtype: alpha)
    return stateless(model, rule, per_sample=jnp.ndim(alpha) == 0)


@bounded
def random_alpha(model: Any, seed: Seed = 0) -> Adaptation:
    """Eq. 7 with alpha ~ U(0, 1), drawn anew for every sample and layer (FedIG, Table 3c).

    Args:
      model: as in `adaptation.stateless`, images -> logits.
      seed: of the random key that the carry holds.
    """

    def predict(
        variables: Variables, key: jax.Array, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        key, now = jax.random.split(key)
        rule = sample_mixed_statistics(random_weights(now))
        return forward(model, variables, images, statistics=rule, valid=valid).outputs, key

    return Adaptation(lambda variables: jax.random.key(seed), predict)


def learned_alpha(model: Any) -> Adaptation:
    """Batch-instance normalization (Nam & Kim, NeurIPS 2018), its gates learned in training.

    The variables need the gates: see `normalization.batch_instance.with_gates`.
    """
    return stateless(model, gated_statistics, per_sample=True)


@bounded
def iabn(model: Any, strength: AtLeast0 = 4.0) -> Adaptation:
    """Instance-aware batch norm of NOTE (Gong et al., NeurIPS 2022), on the trained model.

    Args:
      model: as in `adaptation.stateless`, images -> logits.
      strength: k, the standard errors that a deviation must exceed to count; at least 0.
    """
    return stateless(model, instance_aware_statistics(strength), per_sample=True)
