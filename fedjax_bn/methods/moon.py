"""MOON (Li, He & Song, CVPR 2021): model-contrastive federated learning."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import Above0, AtLeast0, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, minimizing
from fedjax_bn.methods.learning import Options, learning, method_of
from fedjax_bn.models.forward import forward
from fedjax_bn.sharing import PyTree, Variables, join, split_like
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean


@bounded
def moon(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    mu: AtLeast0 = 1.0,
    temperature: Above0 = 0.5,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Clients minimize cross entropy + mu * contrast, which pulls features to the global model's.

    $-\log \frac{e^{s(z, z_r) / T}}{e^{s(z, z_r) / T} + e^{s(z, z_p) / T}}$ is a sample's contrast

    s is the cosine. z are a sample's features before the classifier, of the model in training; of
    masks they are the whole map that the last layer reads, as in FL-MedSegBench's code. z_r
    are those of the received model (shared leaves joined with the client's own personal leaves),
    and z_p those of the client's model at the end of its previous round (in its first round, of the
    initial model). z_r and z_p are computed in evaluation mode and pass no gradient. The reported
    loss is the cross entropy alone. With mu = 0 it is FedAvg.

    Differs from the paper and the authors' code (QinbinLi/MOON): there is no projection head, whose
    256 values are z and the classifier's input. A model that ends in its layers has the same z.

    Args:
      mu: strength of the contrast, at least 0; 1 as in the authors' code and the paper's CIFAR-100
        experiments (5 for CIFAR-10); 0.01 in FL-MedSegBench's code.
      temperature: T, above 0; 0.5 as in the authors' code.
    """
    learned, federate_options = learning(model, last_layer="moon", **options)

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images = learned.read(variables, batch, key)
        loss, out = learned.trained(variables, images, batch, key, wanted=["features"])

        def similarity(shared: PyTree) -> jax.Array:
            # Nothing here depends on the trained parameters, so no gradient passes. The client's
            # personal leaves at the end of its previous round are those at the start of this one.
            model = join(shared, received.personal)
            features = forward(learned.model, model, images, wanted=["features"])
            return _cosine(out.features, features.features) / temperature

        # A cross entropy of two classes; the received model is the right class.
        pair = jnp.stack([similarity(received.shared), similarity(received.memory)], -1)
        contrast = masked_mean(-jax.nn.log_softmax(pair)[:, 0], batch["valid"])
        return loss + mu * contrast, (loss, out.moved)

    return method_of(
        minimizing(objective, optimizer),
        memory=lambda shared, personal: shared,
        # The client keeps its trained shared leaves for the next round.
        finish=lambda received, trained: (
            trained.variables,
            split_like(trained.variables, received.shared)[0],
            (),
        ),
        **federate_options,
    )


def _cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the cosines f[B] of the samples of x and y f[B, ...], with norms at least 1e-8."""
    x, y = (v.reshape(len(v), -1) for v in (x, y))
    # Bounded inside the root, so that the gradient is finite where a vector is 0.
    square_x, square_y = (jnp.maximum(jnp.square(v).sum(-1), 1e-8**2) for v in (x, y))
    return (x * y).sum(-1) * jax.lax.rsqrt(square_x * square_y)
