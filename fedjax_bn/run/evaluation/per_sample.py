"""What a model computes of every sample besides its outputs: features, alphas of the adapter."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from fedjax_bn.adaptation import Adaptation, record_alphas
from fedjax_bn.data.domain import Split
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.models.features import FeaturesOf
from fedjax_bn.normalization.calls import in_forward_order
from fedjax_bn.run.evaluation.scoring_data import stack_batches
from fedjax_bn.sharing import Variables


def alphas_of(
    model: nn.Module, prepare: Prepare, variables: Variables, split: Split, batch_size: int = 256
) -> dict[str, np.ndarray]:
    """Layer name -> alpha f[N] of every sample, in order (FedIG, Fig. 4a and 7 to 9).

    Layers are in the order of the forward pass.
    """
    alphas = _over_batches(prepare, variables, split, batch_size, record_alphas(model))
    images = prepare(jax.numpy.asarray(split.images[:2]), parameter_dtype(variables))
    return {name: alphas[name] for name in in_forward_order(alphas, model, variables, images)}


def features_of(
    make: Callable[[nn.Module], Adaptation],
    model: nn.Module,
    prepare: Prepare,
    variables: Variables,
    split: Split,
    batch_size: int = 256,
) -> np.ndarray:
    """Features f[N, F] before the classifier under an adaptation without carry (FedIG, Fig. 4b).

    Args:
      make: such as `adaptation.running` or `adaptation.zero_shot_adapter`.
      model: linen module.
      prepare: stored images -> what the model reads.
      variables: the collections that the adaptation needs.
      split: the samples.
      batch_size: samples of one pass.
    """
    adaptation = make(FeaturesOf(model))

    def features(variables: Variables, images: jax.Array) -> jax.Array:
        return adaptation.predict(variables, adaptation.init(variables), images)[0]

    return _over_batches(prepare, variables, split, batch_size, features)


def _over_batches(
    prepare: Prepare,
    variables: Variables,
    split: Split,
    batch_size: int,
    function: Callable[[Variables, jax.Array], Any],
) -> Any:
    """The function's outputs [B, ...] over all samples, one after the other [N, ...]."""
    data = stack_batches([split], batch_size)

    @jax.jit
    def run(variables: Variables, images: jax.Array) -> Any:
        dtype = parameter_dtype(variables)
        return jax.lax.map(lambda batch: function(variables, prepare(batch, dtype)), images)

    def joined(leaf: jax.Array) -> np.ndarray:
        return np.asarray(leaf).reshape(-1, *leaf.shape[2:])[: len(split.images)]

    return jax.tree.map(joined, run(variables, data.images))
