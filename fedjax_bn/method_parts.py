"""What some methods train besides the model, and which adaptations need it."""

from collections.abc import Iterable

import flax.linen as nn
import jax
from ml_collections import ConfigDict

from fedjax_bn.errors import ConfigError
from fedjax_bn.normalization.adapter import with_adapter
from fedjax_bn.sharing import Variables


def with_method_parts(
    config: ConfigDict, model: nn.Module, variables: Variables, images: jax.Array, key: jax.Array
) -> Variables:
    """The common start with what the configured method trains besides: FedIG-A its adapter.

    Args:
      config: the run's.
      model: linen module.
      variables: its collections.
      images: f[B, ...] as the model reads them; only the shape counts.
      key: random key.

    Raises:
      ValueError: the model has no batch norm to adapt.
    """
    if config.method == "fediga":
        return with_adapter(key, model, variables, images)
    return variables


# What an adaptation needs of the method that trained the model.
NEEDS = {
    "zero_shot_adapter": lambda config: config.method == "fediga",
    "learned_alpha": lambda config: config.method == "fedig" and config.fedig.gates,
}


def suits(config: ConfigDict, text: str) -> bool:
    """Whether the configured method trains what an adaptation needs."""
    return NEEDS.get(text.partition(":")[0], lambda config: True)(config)


def check_adaptations(config: ConfigDict, adaptations: Iterable[str]) -> None:
    """Raises ConfigError if an adaptation needs what the configured method does not train."""
    for text in adaptations:
        if not suits(config, text):
            raise ConfigError(
                f"config.adaptations has {text!r}, for which method={config.method!r} trains "
                "nothing: zero_shot_adapter needs method=fediga, learned_alpha needs method=fedig "
                "with fedig.gates=True"
            )
