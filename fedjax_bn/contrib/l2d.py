"""L2D (Wang et al., ICCV 2021): learning to diversify, for clients with a single domain each."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, Channels, UpTo1, bounded
from fedjax_bn.contrib.parts import affine, draw_dense, kernel, require_images, squared_distances
from fedjax_bn.engine.dtypes import parameter_dtype, promote
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, Value, in_turn, minimizing
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models import cpu
from fedjax_bn.models.classifier import sizes_of
from fedjax_bn.models.forward import Output
from fedjax_bn.normalization.instance import instance_moments
from fedjax_bn.sharing import PyTree, Variables, without
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean

STYLIST, LIKELIHOOD = "stylist", "likelihood"  # collections
TEMPERATURE = 0.07
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # the kernels' widths relative to the mean squared distance
SIDES = (5, 9, 13, 17)  # the kernel sizes of the stylist's branches
_DROPPED = 0.2
_EPSILON = 1e-5  # PyTorch's default for instance norm
_FIXED = 2021  # seed of the kernels in a fixed pass


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
    r"""Clients learn from their images x and from images x' in styles that learn to differ.

    $CE(x, x') + contrast \; SupCon(z, z'; y) + likelihood \; S(\mu(z), v(z), z')$ for the model

    $MMD(z, z' | y) + leak \; CLUB(\mu(z), v(z), z')$ for the stylist

    $S(\mu, v, z') = (z' - \mu)^2 / v + \log v$, a mean over samples and features

    z and z' are the features of x and of x', which `stylize` makes. SupCon is the supervised
    contrast (Khosla et al. 2020) with temperature 0.07. Two dense layers compute mu (leaky ReLU)
    and log v (ReLU) from z. S, the surprise, is -2 / F times the log-likelihood of z' under
    N(mu, v), without its constant. CLUB bounds the information of z about z' (Cheng et al. 2020).
    MMD is `class_discrepancy`. A step first moves the model and the layers of mu and v. Then plain
    gradient descent moves the stylist's scales and shifts; this second pass uses fixed kernels and
    moves no statistics. The stylist, the collection `stylist`, and the layers of mu and v,
    `likelihood`, travel with the model and do not predict. The reported loss is CE. A step costs
    four passes.

    Terms and defaults are those of the authors' code (BUserName/Learning_to_diversify). Differs
    from it: the stylist's scales and shifts are by channel, theirs are maps for 224 pixels; its
    sigmoid is standardized by 0.5 and 0.5; z are the model's own features, theirs are drawn from
    N(mu, 0.04 v) and read by the classifier; CLUB is the mean over all pairs, not of a random one.

    Args:
      optimizer: the local optimizer of the model and of the layers of mu and v.
      share_of_style: weight of the new style in x', in [0, 1].
      contrast: weight of SupCon, at least 0.
      likelihood: weight of the surprise, at least 0.
      leak: weight of CLUB, at least 0.
      rate: learning rate of the stylist, at least 0.
      channels: C of the images that the model reads.
    """
    learned, federate_options = learning(model, classifier="l2d", **options)
    goal = diversified_objective(learned, share_of_style, contrast, likelihood)
    step = minimizing(goal, optimizer, ("params", LIKELIHOOD))

    def styling(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        _, out = _both(learned, variables, batch, key, share_of_style, None)
        (z, z_styled), valid = jnp.split(out.features, 2), batch["valid"]
        value = class_discrepancy(z, z_styled, batch["label"], valid, out.outputs.shape[-1])
        value += leak * leaked_information(*_moments_of(variables[LIKELIHOOD], z), z_styled, valid)
        return value, (value, {})  # moves no statistics

    # Without a style x' is x, and nothing would move the stylist.
    if share_of_style:
        # The stylist's step uses the features of the model after its step.
        step = in_turn(step, minimizing(styling, optax.sgd(rate), (STYLIST,)))

    def start(key: jax.Array, variables: Variables) -> Variables:
        stylist_key, layers_key = jax.random.split(stream(key, "stylist"))
        sizes, layers = sizes_of(model, variables), {}
        for name, layer_key in zip(("mean", "logs"), jax.random.split(layers_key), strict=True):
            layers[name] = draw_dense(layer_key, sizes.features, sizes.features, sizes.dtype)
        stylist = draw_stylist(stylist_key, channels, parameter_dtype(variables))
        return {STYLIST: stylist, LIKELIHOOD: layers} | variables

    return method_of(step, start=start, **federate_options)


def diversified_objective(
    learned: Learning, share: float, contrast: float, likelihood: float
) -> Objective:
    """Returns the model's objective, for variables with `stylist` and `likelihood`; see `l2d`."""

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        loss, out = _both(learned, variables, batch, key, share, stream(key, "styled images"))
        value = loss
        if contrast:
            label, valid = (jnp.tile(batch[name], 2) for name in ("label", "valid"))
            near = supervised_contrast(out.features, label, valid)
            value += contrast * near.astype(loss.dtype)
        if likelihood:
            z, z_styled = jnp.split(out.features, 2)
            mean, logs = _moments_of(variables[LIKELIHOOD], z)
            surprise = jnp.square(mean - z_styled) * jnp.exp(-logs) + logs
            term = masked_mean(surprise.mean(-1), batch["valid"])
            value += likelihood * term.astype(loss.dtype)
        return value, (loss, out.moved)

    return objective


def _both(
    learned: Learning, variables: Variables, batch: Batch, key: jax.Array, share: float,
    style: jax.Array | None,
) -> tuple[jax.Array, Output]:  # fmt: skip
    """Makes a training pass over x and x' together; returns its cross entropy f[], and `Output`."""
    images = learned.read(variables, batch, key)
    styled = stylize(variables[STYLIST], images, share, style)
    twice = batch | {name: jnp.tile(batch[name], 2) for name in ("label", "valid")}
    pairs, plain = jnp.concatenate([images, styled]), without(variables, STYLIST, LIKELIHOOD)
    return learned.trained(plain, pairs, twice, key, wanted=["features"])


def supervised_contrast(z: jax.Array, label: jax.Array, valid: jax.Array) -> jax.Array:
    r"""Returns SupCon f[] (Khosla et al. 2020, L_out) of vectors f[N, F], a mean over valid ones.

    $-\frac{1}{|P_i|} \sum_{p \in P_i} \log(e^{z_i z_p / T} / \sum_{a \ne i} e^{z_i z_a / T})$

    P_i are the other samples of the same class; all z are scaled to length 1.
    """
    # Bounded inside the root, so that the gradient is finite where a vector is 0.
    z = z * jax.lax.rsqrt(jnp.maximum(jnp.square(z).sum(-1, keepdims=True), 1e-24))
    is_contrasted = valid & ~jnp.eye(len(z), dtype=bool)
    # -1e30 and not -inf, which would make a row without others NaN.
    near = jnp.where(is_contrasted, z @ z.T / TEMPERATURE, -1e30)
    logs = near - jax.nn.logsumexp(near, axis=1, keepdims=True)
    positive = (is_contrasted & (label[:, None] == label)).astype(z.dtype)
    count = positive.sum(1)
    # A sample without another one of its class has no contrast, and count 1 avoids 0 / 0.
    losses = -(jnp.where(is_contrasted, logs, 0) * positive).sum(1) / jnp.maximum(count, 1)
    return masked_mean(losses, valid & (count > 0))


def class_discrepancy(
    z: jax.Array, styled: jax.Array, label: jax.Array, valid: jax.Array, classes: int
) -> jax.Array:
    """Returns MMD^2 f[] of z and z' f[B, F] within each class, averaged over the batch's classes.

    A class's kernels are as wide as the mean squared distance of two of its vectors z and z'.
    """
    z_pairs = jnp.concatenate([z, styled])
    far = squared_distances(z_pairs, z_pairs)
    # f[classes, B], so that sums within each class are matrix products.
    members = jax.nn.one_hot(label, classes, dtype=z.dtype).T * valid.astype(z.dtype)
    count, owned = members.sum(1), jnp.tile(members, 2)
    pairs = jnp.maximum(2 * count * (2 * count - 1), 1)
    widths = jnp.einsum("ca,ab,cb->c", owned, far, owned) / pairs
    values = kernel(far, (widths @ owned)[:, None], RATIOS)
    members /= jnp.maximum(count, 1)[:, None]
    signs = jnp.concatenate([members, -members], 1)
    return masked_mean(jnp.einsum("ca,ab,cb->c", signs, values, signs), count > 0)


def leaked_information(
    mean: jax.Array, logs: jax.Array, styled: jax.Array, valid: jax.Array
) -> jax.Array:
    """Returns CLUB f[]: mean_i [log N(z'_i; mu_i, v_i) - mean_j log N(z'_j; mu_i, v_i)]."""
    count = jnp.maximum(valid.sum(dtype=styled.dtype), 1)
    valid_rows = jnp.where(valid[:, None], styled, 0)
    moment1, moment2 = valid_rows.sum(0) / count, jnp.square(valid_rows).sum(0) / count
    # Two moments of z' give the mean over all pairs without a matrix of pairs.
    apart = moment2 - 2 * mean * moment1 + jnp.square(mean)
    gaps = 0.5 * ((apart - jnp.square(mean - styled)) * jnp.exp(-logs)).sum(-1)
    return masked_mean(gaps, valid)


def _moments_of(layers: PyTree, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mu and log v f[B, F], each by a dense layer, with leaky ReLU and with ReLU."""
    return jax.nn.leaky_relu(affine(layers["mean"], z)), jax.nn.relu(affine(layers["logs"], z))


def draw_stylist(key: jax.Array, channels: int, dtype: Any) -> PyTree:
    """Draws {"scale", "shift"} f[branches, C] around 1 and 0, with standard deviation 0.1."""
    scale_key, shift_key = jax.random.split(key)
    shape = (len(SIDES), channels)
    return {
        "scale": 1 + 0.1 * jax.random.normal(scale_key, shape, dtype),
        "shift": 0.1 * jax.random.normal(shift_key, shape, dtype),
    }


def stylize(layers: PyTree, x: jax.Array, share: float, key: jax.Array | None = None) -> jax.Array:
    r"""Returns images f[B, H, W, C] in another style, which is partly learned.

    $x' = share (2 \, \mathrm{sigmoid}(g(x)) - 1) + (1 - share) x$

    $g(x) = \sum_i w_i \tanh(branch_i(x)) / \sum_i w_i$ with $w_i \sim N(0, 1)$

    The first branch is a random 1x1 convolution with dropout 0.2. The others are random k x k
    convolutions, k = 5, 9, 13, 17; their maps are normalized by sample and channel, get a learned
    scale and shift, and pass a random transposed k x k convolution. Kernels larger than the image
    are left out. `key` draws kernels, dropout and weights; None gives fixed kernels, no dropout and
    equal weights.
    """
    require_images("l2d", x, layers["scale"].shape[1])
    # Without padding, a kernel larger than the image would give no output.
    sides = [side for side in SIDES if side <= min(x.shape[1:3])]
    drawn = jax.random.key(_FIXED) if key is None else key
    color_key, drop_key, weight_key, *keys = jax.random.split(drawn, 3 + 2 * len(sides))
    color = _convolved(color_key, 1, x, 0)
    if key is not None:
        is_retained = jax.random.bernoulli(drop_key, 1 - _DROPPED, x.shape)
        color = jnp.where(is_retained, color / (1 - _DROPPED), 0)
    branches = [color]
    for i, side in enumerate(sides):
        down = _styled(_convolved(keys[2 * i], side, x, 0), layers["scale"][i], layers["shift"][i])
        branches.append(_convolved(keys[2 * i + 1], side, down, side - 1))
    weights = jnp.ones(len(branches), x.dtype)
    if key is not None:
        weights = jax.random.normal(weight_key, weights.shape, x.dtype)
    # Drawn weights have both signs, so their sum may be 0.
    weights /= jnp.where(weights.sum() == 0, 1, weights.sum())
    total = sum(w * jnp.tanh(branch) for w, branch in zip(weights, branches, strict=True))
    return share * (2 * jax.nn.sigmoid(total) - 1) + (1 - share) * x


def _convolved(key: jax.Array, side: int, x: jax.Array, padding: int) -> jax.Array:
    """Applies a random convolution with PyTorch's bounds, without bias; transposed if padded."""
    channels = x.shape[-1]
    bound = (channels * side**2) ** -0.5
    kernel = jax.random.uniform(key, (side, side, channels, channels), x.dtype, -bound, bound)
    # With stride 1 a transposed convolution is a plain one with padding k - 1.
    return cpu.convolve(x, kernel, (1, 1), [(padding, padding)] * 2)


def _styled(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Normalizes maps by sample and channel, then applies scale and shift f[C]."""
    dtype = promote(x.dtype, jnp.float32)
    mean, var = (moment[:, None, None] for moment in instance_moments(x))
    normalized = (x.astype(dtype) - mean) * jax.lax.rsqrt(var + _EPSILON)
    return (normalized * scale.astype(dtype) + shift.astype(dtype)).astype(x.dtype)
