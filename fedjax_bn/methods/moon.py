"""MOON (Li, He & Song, CVPR 2021): model-contrastive federated learning."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import Above0, AtLeast0, bounded
from fedjax_bn.client import Trained
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.forward import forward
from fedjax_bn.sharing import Variables, join, split_like
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean, require_classifier

PyTree = Any


@bounded
def moon(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    mu: AtLeast0 = 1.0,
    temperature: Above0 = 0.5,
    **options: Unpack[Options],
) -> FederatedMethod:
    """Clients minimize cross entropy + mu * contrast, which pulls features to the received model's.

        contrast = -log(e^(sim(z, z_rec) / T) / (e^(sim(z, z_rec) / T) + e^(sim(z, z_prev) / T)))

    sim is the cosine; z are a sample's features before the classifier by the model in training,
    z_rec by the received one (shared leaves joined with the client's own personal ones), z_prev by
    the client's model at the end of its previous round (in its first: the initial model); the last
    two in evaluation mode and without gradient. The reported loss is the cross entropy alone. With
    mu = 0 it is FedAvg.

    Differs from the paper and the authors' code (QinbinLi/MOON): there is no projection head.
    Theirs is part of the network, behind its features: two dense layers with a ReLU between, to 256
    values, which are z and what the classifier reads. A model that ends so has that z here too.

    Args:
      model: images -> logits; `fedjax_bn.models.features` says what its features are.
      optimizer: the local optimizer.
      mu: strength of the contrast, at least 0; 1 as in the authors' code and the paper's CIFAR-100
        experiments (5 for CIFAR-10).
      temperature: T, above 0; 0.5 as in the authors' code.
      **options: those of `fedavg`.

    Raises:
      ValueError: `mu` or `temperature` is out of its range, or the task is not classification; at
        `round`, where the model shows no features and does not end in a dense layer.
    """
    learned, rest = learning(model, **options)
    require_classifier("moon", learned.task)
    objective = _contrastive(learned, mu, temperature)
    return method_of(
        gradient_step(differentiate(objective), optimizer),
        memory=lambda shared, personal: shared,
        finish=_remember_shared,
        **rest,
    )


def _contrastive(learned: Learning, mu: float, temperature: float) -> Objective:
    """Cross entropy + mu * contrast, see `moon`; the client's memory is its previous shared part.

    Its previous personal leaves are those with which it starts the round.
    """
    model = learned.model

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        out = forward(
            model, variables, images, train=True, valid=valid, key=key, wanted=["features"]
        )
        loss = learned.task.loss(out.outputs, batch["label"], valid)

        def similarity(shared: PyTree) -> jax.Array:
            # Nothing here depends on the parameters being trained: no gradient.
            other = forward(model, join(shared, received.personal), images, wanted=["features"])
            return cosine(out.features, other.features) / temperature

        pair = jnp.stack([similarity(received.shared), similarity(received.memory)], -1)
        contrast = masked_mean(-jax.nn.log_softmax(pair)[:, 0], valid)
        return loss + mu * contrast, (loss, out.moved)

    return objective


def cosine(x: jax.Array, y: jax.Array, epsilon: float = 1e-8) -> jax.Array:
    """Cosine similarity f[B] of f[B, F] and f[B, F]; each norm counts as at least `epsilon`."""
    square_x, square_y = (jnp.square(v).sum(-1) for v in (x, y))
    norms = jnp.maximum(square_x, epsilon**2) * jnp.maximum(square_y, epsilon**2)
    return (x * y).sum(-1) * jax.lax.rsqrt(norms)


def _remember_shared(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """The client keeps its trained shared leaves for the next round."""
    shared, _ = split_like(trained.variables, received.shared)
    return trained.variables, shared, ()
