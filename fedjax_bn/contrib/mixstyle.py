"""MixStyle (Zhou et al., ICLR 2021): mixes the styles of early feature maps of two samples."""

from math import prod
from typing import Any, Unpack
from zlib import crc32

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import Above0, UpTo1, bounded
from fedjax_bn.contrib.parts import STAGES, require_maps, stages_of
from fedjax_bn.engine.keys import stream
from fedjax_bn.engine.perturb import partners
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, minimizing
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.normalization.calls import changing_outputs, spatial_layers
from fedjax_bn.sharing import Variables, batch_norm_paths
from fedjax_bn.state import Received

_EPSILON = 1e-6  # added to a variance, as in the authors' code


@bounded
def mixstyle(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    names: str = "",
    probability: UpTo1 = 0.5,
    concentration: Above0 = 0.1,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""FedAvg whose clients, in training, mix the styles of feature maps within a batch.

    $x' = s_{mix} (x - m_i) / s_i + m_{mix}$ with mean $m_i$ and deviation $s_i$

    $m_{mix} = l m_i + (1 - l) m_j$, likewise $s_{mix}$, with $l \sim Beta(a, a)$

    Mean and deviation are over the positions of each sample's channel and pass no gradient. j is
    another valid sample of the client's batch; l is one number for each sample. Each named place
    mixes or not, independently. With probability 0 it is FedAvg. This is the paper's random mixing;
    partners from another domain need batches with several domains, and a client has one.

    Args:
      model: images -> outputs, whose named modules give maps f[B, ..., C] with spatial axes.
      names: modules after which styles mix, see `contrib.parts.stages_of`. "" means the ends of the
        stages layer1, layer2 and layer3, as in the authors' scripts for PACS, or in a model without
        them the first two batch norms that see maps, our choice.
      probability: probability that a place mixes in a pass, in [0, 1]; 0.5 as in the paper.
      concentration: a, above 0; 0.1 as in the paper.
    """
    learned, federate_options = learning(model, **options)
    plain = supervised(learned)

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        # Only their shape: the pass reads the images itself.
        images = jax.eval_shape(lambda: learned.read(variables, batch, key))
        places, own_key = chosen_maps(model, variables, images, names), stream(key, "mixed styles")
        mixed_places = set()

        def mixed(name: str, x: jax.Array) -> jax.Array:
            if prod(x.shape[1:-1]) < 2:
                return x  # a deviation needs at least two positions
            mixed_places.add(name)
            # Each place has its own key, derived from its name.
            keys = jax.random.split(jax.random.fold_in(own_key, crc32(name.encode())), 3)
            shape = (len(x), *(1,) * (x.ndim - 1))
            weight = jax.random.beta(keys[1], concentration, concentration, shape, x.dtype)
            restyled = with_styles(x, x[partners(keys[0], batch["valid"])], weight)
            return jnp.where(jax.random.bernoulli(keys[2], probability), restyled, x)

        with changing_outputs(places, mixed):
            value = plain(variables, batch, received, key)
        require_maps("mixstyle", places, mixed_places)
        return value

    return method_of(minimizing(objective, optimizer), **federate_options)


def with_styles(x: jax.Array, style_source: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns x with mean and deviation l times its own plus 1 - l times the other's.

    x and `style_source` are f[B, ..., C] with two positions or more; l is `weight` f[B, 1, ..., 1].
    """
    axes = tuple(range(1, x.ndim - 1))

    def style(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        var = x.var(axes, keepdims=True, ddof=1)
        # Styles are constants, as in the authors' code.
        return jax.lax.stop_gradient((x.mean(axes, keepdims=True), jnp.sqrt(var + _EPSILON)))

    (mean, std), (other_mean, other_std) = style(x), style(style_source)
    mixed_std = weight * std + (1 - weight) * other_std
    return mixed_std * (x - mean) / std + weight * mean + (1 - weight) * other_mean


def chosen_maps(model: Any, variables: Variables, images: Any, names: str = "") -> tuple[str, ...]:
    """Returns the paths of the modules that `names` means, see `mixstyle`; computes nothing."""
    ends: list[tuple[str, ...]] = [STAGES[0]]
    if not names and batch_norm_paths(variables):
        ends.append(tuple(spatial_layers(model, variables, images))[:2])
    return tuple(stages_of("mixstyle", variables, names, ends))
