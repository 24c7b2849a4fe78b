"""FedSR (Nguyen, Torr & Lim, NeurIPS 2022): a simple representation for domain generalization."""

from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.contrib.parts import affine, draw_dense
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, Value, minimizing
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.classifier import ClassifiedBy, Classify, sizes_of
from fedjax_bn.models.hooks import Hooked, register
from fedjax_bn.sharing import PyTree, Variables, without
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean

LATENT = "latent"  # the collection of the layers between features and classifier
REFERENCE = "reference"  # the collection of each client's r(z|y)
_DRAWS = 20  # number of draws for a prediction, as in the authors' code
_TESTING = 20221128  # seed of the draws of predictions


@bounded
def fedsr(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    l2r: AtLeast0 = 0.01,
    cmi: AtLeast0 = 0.001,
    noise: bool = True,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Clients learn a random latent z between features f and classifier, and keep it simple.

    $CE(classify(z)) + l2r \, \Vert z \Vert + cmi \, KL(p(z|x), r(z|y))$, means over samples

    $z = \mu + s e$ with $\mu = f A + a$, $s = \mathrm{softplus}(f B + b)$ and $e \sim N(0, I)$

    $p(z|x) = N(C \mu, (C s)^2)$ and $r(z|y) = N(m_y, \mathrm{softplus}(v_y)^2)$

    z has as many entries as the features, so that the model's own classifier reads it. Training
    draws one z for each sample; a prediction is the mean of the class probabilities of 20 fixed
    draws. The layers A and B, the collection `latent`, travel with the model. m, v and C, the
    collection `reference`, stay with each client whatever `share` is, as in the authors' code.
    FedL2R is `noise=False, cmi=0`, FedCMI is `l2r=0`. The reported loss is CE.

    Differs from the paper: z has the size of the features (for ResNet-18 and ResNet-50 512 and
    2048, as in the paper), and `weigh` weighs the clients, where theirs have equal weights.

    Args:
      l2r: weight of the norm of z, at least 0; 0.01 in the authors' README for PACS.
      cmi: weight of the divergence, at least 0; 0.001 in the authors' README for PACS.
      noise: whether z is drawn; otherwise z = mu, and a `cmi` above 0 raises ValueError.
    """
    if cmi and not noise:
        raise ValueError("fedsr: cmi needs the deviation of z: leave noise=True, or set cmi=0")
    learned, federate_options = learning(model, classifier="fedsr", **options)
    trained = ("params", LATENT, *([REFERENCE] if cmi else []))
    objective = simple_representation_objective(learned, l2r, cmi)

    def start(key: jax.Array, variables: Variables) -> Variables:
        sizes = sizes_of(model, variables)
        size, dtype = sizes.features, sizes.dtype
        names = ("mean", "deviation") if noise else ("mean",)
        keys = jax.random.split(stream(key, "latent layer"), len(names))
        layers = zip(names, keys, strict=True)
        latent = {name: draw_dense(layer_key, size, size, dtype) for name, layer_key in layers}
        # m = 0, v = 1 and C = 1, as the authors' code starts them.
        ones = jnp.ones((sizes.classes, size), dtype)
        reference = {"mean": 0 * ones, "spread": ones, "scale": jnp.ones((), dtype)}
        return {LATENT: latent} | ({REFERENCE: reference} if cmi else {}) | variables

    step = minimizing(objective, optimizer, trained)
    return method_of(step, keeps=REFERENCE, start=start, **federate_options)


def simple_representation_objective(learned: Learning, l2r: float, cmi: float) -> Objective:
    """Returns the objective of `fedsr`, for variables with `latent` and, for cmi, `reference`."""

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        draws = []

        def drawn(classify: Classify, features: jax.Array) -> jax.Array:
            draws.append(_draw(variables[LATENT], features, key))
            return classify(draws[-1][0])

        # Drawn here and not by `_hook`, because the loss needs z, mean and deviation.
        with_latent = learned._replace(model=ClassifiedBy(learned.model, drawn))
        loss, out = with_latent.trained(without(variables, LATENT), images, batch, key)
        # Inside a model that computes in bfloat16 they have that dtype, and the loss has not.
        z, mean, deviation = jax.tree.map(lambda x: x.astype(loss.dtype), draws[-1])
        lengths = jnp.square(z).sum(-1)
        # Gradient 0 at 0, where the root's gradient is infinite.
        positive = lengths > 0
        lengths = jnp.where(positive, jnp.sqrt(jnp.where(positive, lengths, 1)), 0)
        value = loss + l2r * masked_mean(lengths, valid)
        if cmi:
            assert deviation is not None  # `fedsr` raises ValueError for cmi without noise
            gaps = _divergence(mean, deviation, batch["label"], variables[REFERENCE])
            value += cmi * masked_mean(gaps, valid)
        return value, (loss, out.moved)

    return objective


def _divergence(
    mean: jax.Array, deviation: jax.Array, label: jax.Array, reference: PyTree
) -> jax.Array:
    """Returns KL(N(C mu, (C s)^2) || N(m_y, r_y^2)) f[B], with r = softplus(v)."""
    scale = reference["scale"].astype(mean.dtype)
    m, v = (reference[name].astype(mean.dtype)[label] for name in ("mean", "spread"))
    r = jax.nn.softplus(v)
    spread = jnp.abs(scale) * deviation  # training may make C negative
    distance = jnp.square(spread) + jnp.square(scale * mean - m)
    return (jnp.log(r) - jnp.log(spread) + distance / (2 * jnp.square(r)) - 0.5).sum(-1)


def _hook(tree: PyTree, images: jax.Array, key: jax.Array | None) -> Hooked:
    """Adds the latent between features and classifier, see `models.hooks`."""

    def drawn(classify: Classify, features: jax.Array) -> jax.Array:
        if key is not None or "deviation" not in tree:
            return classify(_draw(tree, features, key)[0])
        shape = (_DRAWS, 1, features.shape[-1])
        # The same draws for every sample and call, so that predictions do not depend on the batch.
        noise = jax.random.normal(jax.random.key(_TESTING), shape, features.dtype)
        mean, deviation = _moments_of(tree, features)
        logits = classify((mean + deviation * noise).reshape(-1, features.shape[-1]))
        # The mean of probabilities by their logarithms, because small ones would underflow.
        logs = jax.nn.log_softmax(logits).reshape(_DRAWS, len(features), -1)
        return jax.nn.logsumexp(logs, 0) - jnp.log(jnp.asarray(_DRAWS, logs.dtype))

    return Hooked(images, drawn)


register(LATENT, _hook)


def _moments_of(latent: PyTree, features: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mu and s, f[B, F] each, for features f[B, F]."""
    deviation = jax.nn.softplus(affine(latent["deviation"], features))
    return affine(latent["mean"], features), deviation


def _draw(
    latent: PyTree, features: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns one draw of z, mu and s, f[B, F] each."""
    if "deviation" not in latent:
        mean = affine(latent["mean"], features)
        return mean, mean, None
    mean, deviation = _moments_of(latent, features)
    noise = jax.random.normal(stream(cast(jax.Array, key), "latent noise"), mean.shape, mean.dtype)
    return mean + deviation * noise, mean, deviation
