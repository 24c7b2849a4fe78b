"""L2D (Wang et al., ICCV 2021): learning to diversify, for clients with a single domain each."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, Channels, UpTo1, bounded
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, differentiate, gradient_step, in_turn
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.classifier import sizes_of
from fedjax_bn.models.forward import Output, forward
from fedjax_bn.rivals.discrepancy import kernel, squared_distances
from fedjax_bn.rivals.stylist import start, stylize
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean, require_classifier

PyTree = Any
STYLIST, LIKELIHOOD = "stylist", "likelihood"  # collections
TEMPERATURE = 0.07
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the kernels' widths


@bounded
def l2d(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    share_of_style: UpTo1 = 0.6,
    contrast: AtLeast0 = 1.0,
    likelihood: AtLeast0 = 1.0,
    leak: AtLeast0 = 0.1,
    rate: AtLeast0 = 0.005,
    channels: Channels = 3,
    **options: Unpack[Options],
) -> FederatedMethod:
    """Clients learn from their images x and from these in styles x' that are to be told apart.

        model:   CE(x and x') + contrast SupCon(z, z'; y) + likelihood surprise(mu(z), v(z), z')
        stylist: MMD(z, z' | y) + leak CLUB(mu(z), v(z), z')
        surprise(mu, v, z') = mean over samples and features of (z' - mu)^2 / v + log v

    z and z' are the features of x and x' = `rivals.stylist.stylize`. SupCon is the supervised
    contrast (Khosla et al. 2020) of temperature 0.07. Two dense layers compute mu (leaky ReLU) and
    log v (ReLU) from z; the surprise is -2 / F times the log-likelihood of z' under N(mu, v),
    without its constant. CLUB bounds the information that z has of z' (Cheng et al. 2020). MMD is
    the mean of `by_class` over the batch's classes, whose kernels have a width a class. A
    step moves the model and the layers of N, then by plain gradient descent the stylist's scales
    and shifts, whose kernels are always the same there; that pass moves no statistics. The stylist,
    the collection `stylist` (a scale and shift a channel of 4 branches), and N's layers,
    `likelihood`, travel with the model and do not predict. The reported loss is CE. A step costs
    four passes.

    Terms and defaults are those of the authors' code (BUserName/Learning_to_diversify: train.py,
    utils/util.py). Differs from it: the stylist's scales and shifts are a number a channel, so that
    any image fits, where theirs are maps that fit 224 pixels; its sigmoid is standardized by 0.5
    and 0.5; z are the model's own features, where theirs are drawn from N(mu, 0.04 v) and read by
    the classifier; CLUB takes the mean over all pairs, where theirs takes one random pairing.

    Args:
      model: f[B, H, W, C] -> logits; `fedjax_bn.models.features` says what its features are.
      optimizer: the local optimizer, of the model and of N's layers.
      share_of_style: of the new style in x', in [0, 1]; 0.6 as in the authors' code.
      contrast: weight of SupCon, at least 0; 1 as in the authors' code.
      likelihood: weight of the surprise, at least 0; 1 as in the authors' code.
      leak: weight of CLUB, at least 0; 0.1 as in the authors' code.
      rate: learning rate of the stylist, at least 0; 0.005 as in the authors' script.
      channels: of the images that the model reads, C.
      **options: those of `fedavg`.

    Raises:
      ValueError: an argument is out of its range, or the task is not classification; at `init`,
        where the size of the features cannot be found; at `round`, where images have other
        channels.
    """
    learned, rest = learning(model, **options)
    require_classifier("l2d", learned.task)
    trained = ("params", LIKELIHOOD)
    goal = diversified(learned, share_of_style, contrast, likelihood)
    first = gradient_step(differentiate(goal, trained), optimizer, trained)
    style = differentiate(_styling(learned, share_of_style, leak), (STYLIST,))
    second = gradient_step(style, optax.sgd(rate), (STYLIST,))
    method = method_of(in_turn(first, second) if share_of_style else first, **rest)

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        if STYLIST not in variables:
            own_key, other_key = jax.random.split(stream(key, "stylist"))
            stylist = start(own_key, channels, parameter_dtype(variables))
            made = {STYLIST: stylist, LIKELIHOOD: _gaussian(other_key, model, variables)}
            variables = {**variables, **made}
        return method.init(key, variables, num_clients)

    return method._replace(init=init)


def diversified(learned: Learning, share: float, contrast: float, likelihood: float) -> Objective:
    """The model's objective, of variables with `stylist` and `likelihood`; see `l2d`."""

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        del received
        out, loss = _both(learned, variables, batch, key, share, stream(key, "styled images"))
        valid, value = batch["valid"], loss
        if contrast:
            label, both = (jnp.tile(batch[name], 2) for name in ("label", "valid"))
            value += contrast * supervised_contrast(out.features, label, both).astype(loss.dtype)
        if likelihood:
            z, other = jnp.split(out.features, 2)
            mean, logs = moments_of(variables[LIKELIHOOD], z)
            value += likelihood * surprise(mean, logs, other, valid).astype(loss.dtype)
        return value, (loss, out.moved)

    return objective


def _styling(learned: Learning, share: float, leak: float) -> Objective:
    """The stylist's objective; it moves nothing else."""

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        del received
        out, _ = _both(learned, variables, batch, key, share, None)
        (z, other), valid = jnp.split(out.features, 2), batch["valid"]
        value = by_class(z, other, batch["label"], valid, out.outputs.shape[-1])
        value += leak * leaked(*moments_of(variables[LIKELIHOOD], z), other, valid)
        return value, (value, {})

    return objective


def _both(
    learned: Learning,
    variables: Variables,
    batch: Batch,
    key: jax.Array,
    share: float,
    style: jax.Array | None,
) -> tuple[Output, jax.Array]:
    """A training pass of x and, behind it, x'; and its cross entropy f[]."""
    images, valid = learned.read(variables, batch, key), batch["valid"]
    styled = stylize(variables[STYLIST], images, share, style)
    plain = {n: tree for n, tree in variables.items() if n not in (STYLIST, LIKELIHOOD)}
    both, images = jnp.tile(valid, 2), jnp.concatenate([images, styled])
    out = forward(
        learned.model, plain, images, train=True, valid=both, key=key, wanted=["features"]
    )
    return out, learned.task.loss(out.outputs, jnp.tile(batch["label"], 2), both)


def supervised_contrast(z: jax.Array, label: jax.Array, valid: jax.Array) -> jax.Array:
    """SupCon f[] (Khosla et al. 2020, L_out) of vectors f[N, F], a mean over the valid ones.

        - mean_i 1/|P_i| sum_{p in P_i} log( exp(z_i.z_p / T) / sum_{a != i} exp(z_i.z_a / T) )

    P_i are the others of the same class, and all z have length 1.
    """
    z = z * jax.lax.rsqrt(jnp.maximum(jnp.square(z).sum(-1, keepdims=True), 1e-24))
    others = valid & ~jnp.eye(len(z), dtype=bool)
    near = jnp.where(others, z @ z.T / TEMPERATURE, -1e30)
    logs = near - jax.nn.logsumexp(near, axis=1, keepdims=True)
    positive = (others & (label[:, None] == label)).astype(z.dtype)
    count = positive.sum(1)
    each = -(jnp.where(others, logs, 0) * positive).sum(1) / jnp.maximum(count, 1)
    return masked_mean(each, valid & (count > 0))


def by_class(
    z: jax.Array, other: jax.Array, label: jax.Array, valid: jax.Array, classes: int
) -> jax.Array:
    """MMD^2 f[] of z and z' f[B, F] within each class, a mean over the classes of the batch.

    The width of a class's kernels is the mean squared distance of two different vectors of its z
    and z' (the authors' `conditional_mmd_rbf`).
    """
    both = jnp.concatenate([z, other])
    far = squared_distances(both, both)
    members = jax.nn.one_hot(label, classes, dtype=z.dtype).T * valid.astype(z.dtype)
    count, owned = members.sum(1), jnp.tile(members, 2)
    pairs = jnp.maximum(2 * count * (2 * count - 1), 1)
    widths = jnp.einsum("ca,ab,cb->c", owned, far, owned) / pairs
    values = kernel(far, (widths @ owned)[:, None], RATIOS)
    members /= jnp.maximum(count, 1)[:, None]
    signs = jnp.concatenate([members, -members], 1)
    return masked_mean(jnp.einsum("ca,ab,cb->c", signs, values, signs), count > 0)


def surprise(mean: jax.Array, logs: jax.Array, other: jax.Array, valid: jax.Array) -> jax.Array:
    """The mean f[] over valid samples and features of (z' - mu)^2 / v + log v, all f[B, F]."""
    gaps = jnp.square(mean - other) * jnp.exp(-logs) + logs
    return masked_mean(gaps.mean(-1), valid)


def leaked(mean: jax.Array, logs: jax.Array, other: jax.Array, valid: jax.Array) -> jax.Array:
    """CLUB f[]: mean_i [log N(z'_i; mu_i, v_i) - mean_j log N(z'_j; mu_i, v_i)]."""
    count = jnp.maximum(valid.sum(dtype=other.dtype), 1)
    known = jnp.where(valid[:, None], other, 0)
    first, second = known.sum(0) / count, jnp.square(known).sum(0) / count
    apart = second - 2 * mean * first + jnp.square(mean)
    gaps = 0.5 * ((apart - jnp.square(mean - other)) * jnp.exp(-logs)).sum(-1)
    return masked_mean(gaps, valid)


def moments_of(layers: PyTree, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """mu and log v f[B, F] of features f[B, F]: a dense layer each, leaky ReLU and ReLU."""
    mean, logs = (
        z @ layers[name]["kernel"].astype(z.dtype) + layers[name]["bias"].astype(z.dtype)
        for name in ("mean", "logs")
    )
    return jax.nn.leaky_relu(mean), jax.nn.relu(logs)


def _gaussian(key: jax.Array, model: Any, variables: Variables) -> PyTree:
    """Two dense layers F -> F, PyTorch's at their start."""
    sizes = sizes_of(model, variables)
    bound = sizes.features**-0.5

    def layer(key: jax.Array) -> PyTree:
        kernel, bias = (
            jax.random.uniform(own, shape, sizes.dtype, -bound, bound)
            for own, shape in zip(
                jax.random.split(key), ((sizes.features,) * 2, (sizes.features,)), strict=True
            )
        )
        return {"kernel": kernel, "bias": bias}

    return dict(zip(("mean", "logs"), map(layer, jax.random.split(key)), strict=True))
