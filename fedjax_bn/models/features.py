"""The two halves of a model: features before the classifier, and the classifier.

A model shows them as methods, `features(images) -> f[B, F]` and `classify(features) -> f[B,
classes]`, such that its `__call__` is one after the other.
"""

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax


def features_and_logits(
    model: nn.Module, images: jax.Array, train: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Both halves in one pass, to be applied in place of `__call__`.

        features, logits = model.apply(variables, images, method=features_and_logits)

    Args:
      model: linen module with `features` and `classify`.
      images: f[B, ...].
      train: handed to the halves that take it.

    Returns:
      features f[B, F] and logits f[B, classes].
    """
    features = model.features(images, **takes_train(model.features, train))
    return features, model.classify(features, **takes_train(model.classify, train))


def takes_train(function: Callable[..., Any], train: bool) -> dict[str, bool]:
    """{"train": train} for a function that has such a parameter, else {}."""
    return {"train": train} if "train" in inspect.signature(function).parameters else {}
