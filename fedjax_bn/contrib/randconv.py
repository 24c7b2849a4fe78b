"""RandConv (Xu et al., ICLR 2021): the same prediction after any random convolution."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, OddSide, UpTo1, bounded
from fedjax_bn.engine import perturb
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, minimizing
from fedjax_bn.methods.learning import Options, learning, method_of
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean

DRAWS = 3  # as in the paper
_LEAST = 1e-7  # lower bound of a mean probability, as in the authors' code


@bounded
def randconv(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    consistency: AtLeast0 = 10.0,
    mix: bool = True,
    identity: UpTo1 = 0.0,
    largest: OddSide = 7,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Clients learn to predict the same after any random convolution of the images.

    $CE(p_1) + \frac{c}{3} \sum_{j=1}^3 KL(p_j | m)$

    p_j are the class probabilities of three passes of a batch, each after another random
    convolution (`perturb.randconv`), and m = (p_1 + p_2 + p_3) / 3, at least 1e-7. Divergences are
    means over the valid samples. Only the model travels. The reported loss is CE(p_1). With c = 0
    there is one pass: FedAvg with `perturb=randconv(...)`. With c = 0 and identity 1 it is FedAvg.

    Differs from the authors' code (wildphoton/RandConv): every pass convolves the image itself, as
    in the paper, not the first pass's result; only the first pass moves running statistics.

    Args:
      consistency: c, at least 0; 10 with `mix`, 5 for RC_img, in the authors' script for digits.
      mix: whether images are mixed with their convolutions (RC_mix) or replaced (RC_img).
      identity: probability that a pass uses the images unchanged; 0.5 for RC_img.
      largest: side of the largest kernel, odd.
      model, optimizer, **options: as in `fedavg`; the convolution comes after `perturb`.
    """
    learned, federate_options = learning(model, classifier="randconv", **options)
    convolve = perturb.randconv(mix, identity, largest)
    draws = DRAWS if consistency else 1

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        passes = [
            learned.trained(variables, convolve(draw_key, images, valid), batch, key)
            for draw_key in jax.random.split(stream(key, "random convolutions"), draws)
        ]
        # Only the first pass is reported and moves running statistics.
        value = loss = passes[0][0]
        if consistency:
            # All passes have the same dropout, so that only the convolutions differ.
            logits = jnp.stack([out.outputs for _, out in passes])
            value += consistency * masked_mean(disagreement(logits), valid)
        return value, (loss, passes[0][1].moved)

    return method_of(minimizing(objective, optimizer), **federate_options)


def disagreement(logits: jax.Array) -> jax.Array:
    """Returns the mean over draws of KL(p_j | m), f[B], for logits f[draws, B, classes]."""
    logs = jax.nn.log_softmax(logits)
    # Clipped as in the authors' code, so that the logarithm is finite.
    mean = jnp.log(jnp.clip(jnp.exp(logs).mean(0), _LEAST, 1))
    return (jnp.exp(logs) * (logs - mean)).sum(-1).mean(0)
