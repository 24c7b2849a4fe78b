"""FedSR (Nguyen, Torr & Lim, NeurIPS 2022): a simple representation for domain generalization."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.classifier import sizes_of
from fedjax_bn.models.features import ClassifiedBy, Classify
from fedjax_bn.models.forward import forward
from fedjax_bn.rivals import latent
from fedjax_bn.sharing import Variables, everything, keeping
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean, require_classifier

PyTree = Any
REFERENCE = "reference"  # the collection of each client's r(z|y)


@bounded
def fedsr(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    l2r: AtLeast0 = 0.01,
    cmi: AtLeast0 = 0.001,
    squared: bool = False,
    noise: bool = True,
    **options: Unpack[Options],
) -> FederatedMethod:
    """Clients minimize CE(classify(z)) + l2r mean ||z|| + cmi mean KL(p(z|x) || r(z|y)).

        z = mu + s e,   p(z|x) = N(C mu, (C s)^2),   r(z|y) = N(m_y, softplus(v_y)^2)

    z is the latent of `rivals.latent`, which `init` adds between features and classifier and
    which predicts by the mean probabilities of 20 draws. Its layers travel with the model; m, v and
    C, the collection `reference`, stay with each client whatever `share` says, as in the authors'
    code. FedL2R is `noise=False, cmi=0`, FedCMI is `l2r=0`. The reported loss is CE.

    Differs from the paper: z has as many entries as the features (512 of ResNet-18 and 2048 of
    ResNet-50, as theirs), and clients are weighed as `weigh` says, where theirs count alike.

    Args:
      model: images -> logits; `fedjax_bn.models.features` says what its features are.
      optimizer: the local optimizer.
      l2r: weight of the norm of z, at least 0; 0.01 in the authors' README for PACS.
      cmi: weight of the divergence, at least 0; 0.001 in the authors' README for PACS.
      squared: whether the norm is squared, as FedCD's Eq. 19 prints it and the code does not.
      noise: whether z is drawn; without, it is mu.
      **options: those of `fedavg`.

    Raises:
      ValueError: a weight is negative, the task is not classification, or there is a divergence
        without noise; at `init`, where the size of the features cannot be found.
    """
    if cmi and not noise:
        raise ValueError("fedsr: cmi needs the deviation of z: leave noise=True, or set cmi=0")
    learned, rest = learning(model, **options)
    require_classifier("fedsr", learned.task)
    trained = ("params", latent.COLLECTION, *([REFERENCE] if cmi else []))
    objective = simple_representation(learned, l2r, cmi, squared=squared)
    share = keeping(rest.pop("share", everything), REFERENCE)
    step = gradient_step(differentiate(objective, trained), optimizer, trained)
    method = method_of(step, share=share, **rest)

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        variables = latent.with_latent(stream(key, "latent layer"), model, variables, noise=noise)
        if cmi and REFERENCE not in variables:
            variables = {**variables, REFERENCE: _reference(model, variables)}
        return method.init(key, variables, num_clients)

    return method._replace(init=init)


def simple_representation(
    learned: Learning, l2r: float, cmi: float, *, squared: bool = False
) -> Objective:
    """The objective of `fedsr`, of variables with `latent` and, for a divergence, `reference`."""

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        del received
        images, valid = learned.read(variables, batch, key), batch["valid"]
        plain = {name: tree for name, tree in variables.items() if name != latent.COLLECTION}

        found = []

        def drawn(classify: Classify, features: jax.Array) -> jax.Array:
            found.append(latent.draw(variables[latent.COLLECTION], features, key))
            return classify(found[-1][0])

        model = ClassifiedBy(learned.model, drawn)
        out = forward(model, plain, images, train=True, valid=valid, key=key)
        logits, (z, mean, deviation) = out.outputs, found[-1]
        loss = learned.task.loss(logits, batch["label"], valid)
        squares = jnp.square(z).sum(-1)
        value = loss + l2r * masked_mean(squares if squared else _root(squares), valid)
        if cmi:
            assert deviation is not None  # there is noise, or `fedsr` has refused
            gaps = divergence(mean, deviation, batch["label"], variables[REFERENCE])
            value += cmi * masked_mean(gaps, valid)
        return value, (loss, out.moved)

    return objective


def divergence(
    mean: jax.Array, deviation: jax.Array, label: jax.Array, reference: PyTree
) -> jax.Array:
    """KL(N(C mu, (C s)^2) || N(m_y, r_y^2)) f[B], with r = softplus(v).

        sum_d [ log r - log(|C| s) + ((C s)^2 + (C mu - m)^2) / (2 r^2) - 1/2 ]

    Args:
      mean, deviation: mu and s, f[B, F].
      label: y i32[B].
      reference: "mean" and "spread", m and v f[classes, F], and "scale", C f[].
    """
    scale = reference["scale"].astype(mean.dtype)
    m, v = (reference[name].astype(mean.dtype)[label] for name in ("mean", "spread"))
    r = jax.nn.softplus(v)
    own = jnp.abs(scale) * deviation
    distance = jnp.square(own) + jnp.square(scale * mean - m)
    return (jnp.log(r) - jnp.log(own) + distance / (2 * jnp.square(r)) - 0.5).sum(-1)


def _root(squares: jax.Array) -> jax.Array:
    """The square root, with gradient 0 at 0."""
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)


def _reference(model: Any, variables: Variables) -> PyTree:
    """m = 0, v = 1 and C = 1, as the authors' code starts them."""
    sizes = sizes_of(model, variables)
    shape = (sizes.classes, sizes.features)
    return {
        "mean": jnp.zeros(shape, sizes.dtype),
        "spread": jnp.ones(shape, sizes.dtype),
        "scale": jnp.ones((), sizes.dtype),
    }
