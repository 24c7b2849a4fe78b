"""FedADG (Zhang et al., IoT-J 2023): pulls all clients' features towards a generator's."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import Units, UpTo1, bounded
from fedjax_bn.client import Client, LocalUpdate
from fedjax_bn.engine.backend import where_tree
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, LocalStep, Objective, Value, in_turn, minimizing
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.classifier import Sizes, sizes_of
from fedjax_bn.models.forward import Output
from fedjax_bn.sharing import PyTree, Variables, without
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean

GENERATOR, DISCRIMINATOR = "generator", "discriminator"  # collections
_ALONE = "classifies_alone"  # entry of a round's batches, bool[S]


@bounded
def fedadg(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    share_of_loss: UpTo1 = 0.85,
    alone: UpTo1 = 0.3,
    hidden: Units = 4096,
    projection: Units = 1024,
    judging: Units = 1024,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Clients train the network, a discriminator D and a generator G.

    $a CE + (1 - a) (1 - D(f, y))^2$ is the network's loss

    $-(D(g, y)^2 + (1 - D(f, y))^2)$ is the loss of D, and $(1 - D(g, y))^2$ the loss of G

    $g = G(u, y)$ with $u \sim U(0, 1)^F$

    f are a sample's features and y its label. A step moves the network, then D, then G, on the same
    batch. In the first steps of a round, a fraction `alone` of them, only the network moves, by CE
    alone. G, the collection `generator`, travels with the model: its outputs resemble features. D,
    the collection `discriminator`, stays with its client whatever `share` is. The reported loss is
    CE. With a = 1 it is FedAvg. A step costs an additional forward pass.

    G reads (u, onehot y) by two dense layers, with leaky ReLU and ReLU. D projects f by a dense
    layer without bias; a dense layer with leaky ReLU and one with a sigmoid read (projected f,
    onehot y).

    Networks and defaults are those of the authors' code for PACS (Haoxiang-Wang/FedADG), the losses
    of D and G those for VLCS. Differs from both: the network moves before D, whose f are those of a
    training pass; labels enter as 1, there as 0.6 (VLCS) or 0.7 (PACS); CE is not smoothed; D and G
    have the network's rate, there 0.7 of it; a client uploads its last state, not its best; G
    learns, which the code for VLCS prevents.

    Args:
      optimizer: the local optimizer of all three, each with a separate state.
      share_of_loss: a, in [0, 1].
      alone: fraction of a round's steps with CE only, in [0, 1].
      hidden: width of G's hidden layer.
      projection: width of D's projection.
      judging: width of D's hidden layer.
    """
    learned, federate_options = learning(model, classifier="fedadg", **options)

    def discriminating(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> Value:
        # A new pass, because the network has moved since the pass of its own step.
        _, out = _passed(learned, variables, batch, key)
        discriminator, label = variables[DISCRIMINATOR], batch["label"]
        generated = generated_features(variables[GENERATOR], label, key)
        sure = jnp.square(_judged(discriminator, generated, label))
        sure += jnp.square(1 - _judged(discriminator, out.features, label))
        value = -masked_mean(sure, batch["valid"])
        return value, (value, {})  # moves no statistics: the network's pass has moved them

    # Each network's step sees the other as a constant, because only its collection is trained.
    def generating(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        own_key, label = stream(key, "generated features"), batch["label"]
        generated = generated_features(variables[GENERATOR], label, own_key)
        gaps = jnp.square(1 - _judged(variables[DISCRIMINATOR], generated, label))
        value = masked_mean(gaps, batch["valid"])
        return value, (value, {})

    def start(key: jax.Array, variables: Variables) -> Variables:
        widths, key = (hidden, projection, judging), stream(key, "generator and judge")
        return _start(key, sizes_of(model, variables), *widths) | variables

    return method_of(
        in_turn(
            minimizing(pulled_to_discriminator(learned, share_of_loss), optimizer),
            _unless_alone(minimizing(discriminating, optimizer, (DISCRIMINATOR,))),
            _unless_alone(minimizing(generating, optimizer, (GENERATOR,))),
        ),
        around=lambda client: _announcing(client, alone),
        keeps=DISCRIMINATOR,
        start=start,
        **federate_options,
    )


def pulled_to_discriminator(learned: Learning, share: float) -> Objective:
    """Returns the network's objective: a CE + (1 - a) (1 - D(f, y))^2; CE in steps `alone`."""

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        loss, out = _passed(learned, variables, batch, key)
        gaps = jnp.square(1 - _judged(variables[DISCRIMINATOR], out.features, batch["label"]))
        value = share * loss + (1 - share) * masked_mean(gaps, batch["valid"]).astype(loss.dtype)
        # The batch has no mark if the objective is called outside a round.
        value = jnp.where(batch[_ALONE], loss, value) if _ALONE in batch else value
        return value, (loss, out.moved)

    return objective


def generated_features(layers: PyTree, label: jax.Array, key: jax.Array) -> jax.Array:
    """Returns G(u, y) f[B, F], u ~ U(0, 1)^F."""
    kernel = layers["kernel"]
    features = layers["out_bias"].shape[0]
    noise = jax.random.uniform(key, (len(label), features), kernel.dtype)
    hidden = jax.nn.leaky_relu(_with_label(noise, label, kernel) @ kernel + layers["bias"])
    return jax.nn.relu(hidden @ layers["out"] + layers["out_bias"])


def _judged(layers: PyTree, features: jax.Array, label: jax.Array) -> jax.Array:
    """Returns D(f, y) f[B], in (0, 1)."""
    kernel = layers["kernel"]
    projected = features.astype(kernel.dtype) @ layers["projection"]
    hidden = jax.nn.leaky_relu(_with_label(projected, label, kernel) @ kernel + layers["bias"])
    return jax.nn.sigmoid(hidden @ layers["out"] + layers["out_bias"])


def _with_label(x: jax.Array, label: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns (x, onehot y), with as many entries as the kernel reads."""
    return jnp.concatenate([x, jax.nn.one_hot(label, len(kernel) - x.shape[1], dtype=x.dtype)], 1)


def _passed(
    learned: Learning, variables: Variables, batch: Batch, key: jax.Array
) -> tuple[jax.Array, Output]:
    images = learned.read(variables, batch, key)
    plain = without(variables, GENERATOR, DISCRIMINATOR)
    return learned.trained(plain, images, batch, key, wanted=["features"])


def _announcing(client: Client, share: float) -> Client:
    """Returns the client that marks a round's first steps, in which only the network trains."""

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        real = batches["valid"].any(1).astype(float)  # f[S]
        # Counted over steps with samples: a short client's padding must not change the fraction.
        early = jnp.cumsum(real) - real < share * real.sum()
        return client.run(received, batches | {_ALONE: early}, key)

    return client._replace(run=run)


def _unless_alone(step: LocalStep) -> LocalStep:
    """Returns the step that does nothing while only the network trains."""

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        *updated, loss = step.update(variables, state, batch, received, key)
        return *where_tree(batch[_ALONE], (variables, state), tuple(updated)), loss

    return step._replace(update=update)


def _start(key: jax.Array, sizes: Sizes, hidden: int, projection: int, judging: int) -> Variables:
    """Draws both networks as the authors do: G by half of Glorot's, D by He's uniform bounds."""
    features, read = sizes.features, projection + sizes.classes
    keys = iter(jax.random.split(key, 9))

    def draw(bound: float, *shape: int) -> jax.Array:
        return jax.random.uniform(next(keys), shape, sizes.dtype, -bound, bound)

    def glorot(inputs: int, outputs: int) -> jax.Array:
        return draw(0.5 * (6 / (inputs + outputs)) ** 0.5, inputs, outputs)

    return {
        GENERATOR: {
            "kernel": glorot(features + sizes.classes, hidden),
            "bias": draw((features + sizes.classes) ** -0.5, hidden),
            "out": glorot(hidden, features),
            "out_bias": draw(hidden**-0.5, features),
        },
        DISCRIMINATOR: {
            "projection": draw((6 / features) ** 0.5, features, projection),
            "kernel": draw((6 / read) ** 0.5, read, judging),
            "bias": draw(read**-0.5, judging),
            "out": draw((6 / judging) ** 0.5, judging),
            "out_bias": draw(judging**-0.5),
        },
    }
