"""CSAC (Yuan et al., TKDE 2023): semantic aggregation and calibration of separated domains."""

import math
from contextlib import AbstractContextManager
from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import Weighing, WeighingRule, by_divergence
from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.client import Trained
from fedjax_bn.contrib.parts import affine, draw_dense, kernel, squared_distances, stages_of
from fedjax_bn.engine.backend import where_tree
from fedjax_bn.engine.dtypes import parameter_dtype, promote
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, Value, minimizing
from fedjax_bn.methods.learning import Learning, Options, learning, method_of, supervised
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization.calls import changing_outputs
from fedjax_bn.sharing import PyTree, Variables, join, without
from fedjax_bn.state import Received

COLLECTION = "calibration"  # the layers that bring all stages to one size
_CHANNELS, _SIDE = 32, 7
# Where stages 2 to 4 of a residual and of a densely connected network end.
_ENDS = (("layer2", "layer3", "layer4"), ("transition2/conv", "transition3/conv", "final_norm"))
RATIOS = tuple(2 * 3.0**k for k in range(-3, 2))  # exp(-d / (2 * 3^k m))


@bounded
def csac(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    calibration: AtLeast0 = 0.6,
    stages: bool = True,
    names: str = "",
    weigh: Annotated[WeighingRule | Weighing | None, by_divergence] = None,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""The server fuses leaves by divergence; clients stay near what they first learned (CSAC).

    Clients minimize CE + calibration times the gaps between the model in training, t, and their own
    model at the end of their first round, s, which stays frozen in all later rounds:

    $\sum_{ij} a_{ij} MMD(t_i, s_j) + MMD(logits)$

    $a_{ij} = \mathrm{softmax}_j (\mathrm{mean} \langle t_i, s_j \rangle / \sqrt{D})$

    t_i and s_j are the outputs of some modules. Bilinear sampling and separate learned layers bring
    them to [32, 7, 7]. a passes no gradient, and MMD is `discrepancy`. In its first round a client
    minimizes CE. `aggregation.by_divergence` (`weigh`) weighs each leaf separately. The learned
    layers, the collection `calibration`, travel with the model and do not predict. The reported
    loss is CE. With calibration 0 it is FedAvg with this weighing. A step costs a pass.

    The sum over stages is the paper's; the authors' code (junkunyuan/CSAC) leaves it out by
    default, as `stages=False` does. Differs from both: the first round has as many epochs as any
    other, not 30; a compares the stages themselves, theirs is the mean of two attentions, one of
    random layers; stages are sampled and projected by position, not convolved; the layers are
    averaged, not drawn in each round; there is no bottleneck of 256; MMD is the biased estimate.

    Args:
      calibration: weight of the gaps, at least 0; 0.6 in the authors' code.
      stages: whether stages are compared in addition to logits.
      names: modules whose outputs are the stages, see `contrib.parts.stages_of`. "" for the first
        that the model has: the ends of layer2 to layer4, as in the authors' code; a DenseNet's
        last two transitions and its last batch norm; all batch norms.
      weigh: the weighing rule; `by_divergence()` by default.
    """
    learned, federate_options = learning(model, classifier="csac", **options)
    stages = stages and calibration > 0
    trained = ("params", COLLECTION) if stages else ("params",)

    def start(key: jax.Array, variables: Variables) -> Variables:
        if not stages:
            return variables
        places, dtype = stages_of("csac", variables, names, _ENDS), parameter_dtype(variables)
        keys = jax.random.split(stream(key, "attention"))
        layers: dict[str, PyTree] = {"trained": {}, "frozen": {}}
        for model_layers, model_key in zip(layers.values(), keys, strict=True):
            layer_keys = jax.random.split(model_key, len(places))
            for layer_key, (name, size) in zip(layer_keys, places.items(), strict=True):
                # Drawn in the default dtype, as for all models alike.
                drawn = draw_dense(layer_key, size, _CHANNELS, jnp.result_type(float))
                model_layers[name] = drawn
        return {COLLECTION: jax.tree.map(lambda leaf: leaf.astype(dtype), layers)} | variables

    objective = calibrated_objective(learned, calibration)
    return method_of(
        minimizing(objective, optimizer, trained),
        # A placeholder, replaced at the end of the client's first round, before it counts.
        memory=lambda shared, personal: {
            "model": without(join(shared, personal), COLLECTION),
            "trained": jnp.zeros((), bool),
        },
        finish=_remember,
        weigh=weigh or by_divergence(),
        start=start,
        **federate_options,
    )


def calibrated_objective(learned: Learning, weight: float) -> Objective:
    """Returns the objective of `csac`, which compares stages if there is a `calibration`."""
    if not weight:
        return supervised(learned)

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        layers = variables.get(COLLECTION, {"trained": {}, "frozen": {}})
        outputs: dict[str, dict[str, jax.Array]] = {"trained": {}, "frozen": {}}

        def noting(model_name: str) -> AbstractContextManager:
            def note(name: str, x: jax.Array) -> jax.Array:
                outputs[model_name][name] = x
                return x

            return changing_outputs(layers[model_name], note)

        with noting("trained"):
            loss, out = learned.trained(without(variables, COLLECTION), images, batch, key)
        with noting("frozen"):
            # The memory has only trained leaves; the frozen ones come from the state.
            round_start = received.with_frozen(received.memory["model"])
            frozen = forward(learned.model, round_start, images)
        gaps = discrepancy(out.outputs, frozen.outputs, valid)
        if outputs["trained"]:
            t, s = (stages_brought(layers[name], seen) for name, seen in outputs.items())
            gaps += stage_gaps(t, s, valid).astype(gaps.dtype)
        # In its first round a client has no frozen model: the gaps are computed, but count 0.
        gaps = jnp.where(received.memory["trained"], gaps, 0)
        return loss + weight * gaps.astype(loss.dtype), (loss, out.moved)

    return objective


def stage_gaps(trained: jax.Array, frozen: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns sum_ij a_ij MMD(t_i, s_j) f[], for stages f[stages, B, D] each; see `csac`."""
    products = jnp.einsum("ibd,jbd->ijb", trained, frozen) * trained.shape[-1] ** -0.5
    count = jnp.maximum(valid.sum(dtype=products.dtype), 1)
    # Padding has no product, so that it adds nothing to the mean.
    attention = jax.nn.softmax(jnp.where(valid, products, 0).sum(-1) / count, axis=1)
    within = jax.vmap(squared_distances)
    # One matrix product for all pairs of stages is faster than one for each pair.
    distances = squared_distances(
        *(stages.reshape(-1, stages.shape[-1]) for stages in (trained, frozen))
    )
    distances = distances.reshape(len(trained), len(valid), len(frozen), len(valid)).swapaxes(1, 2)

    gap_of_pairs = jax.vmap(jax.vmap(_by_distances, (None, 0, 0, None)), (0, None, 0, None))
    gaps = gap_of_pairs(within(trained, trained), within(frozen, frozen), distances, valid)
    # With a gradient, the attention would turn to the pairs that differ least.
    return (jax.lax.stop_gradient(attention) * gaps).sum()


def stages_brought(layers: PyTree, seen: dict[str, jax.Array]) -> jax.Array:
    """Returns all stages f[B, ..., C] at one size, after their layers: f[stages, B, 7 * 7 * 32]."""

    def brought(name: str) -> jax.Array:
        x = seen[name].astype(promote(seen[name].dtype, jnp.float32))
        # An output with fewer than two spatial axes counts as a map of one row, or of one pixel.
        positions = (*x.shape[1:-1], 1, 1)[:2] if x.ndim < 4 else x.shape[1:3]
        x = x.reshape(len(x), *positions, x.shape[-1])
        # The layer commutes with sampling, so it comes first on maps with fewer positions.
        small = math.prod(positions) <= _SIDE * _SIDE
        x = affine(layers[name], x if small else _resized(x))
        return (_resized(x) if small else x).reshape(len(x), -1)

    return jnp.stack([brought(name) for name in seen])


def _resized(x: jax.Array) -> jax.Array:
    """Returns `jax.image.resize` of maps f[B, H, W, C] to 7 x 7."""
    # One product for each image or row, because XLA:CPU would first move the maps' axes.
    for axis in (1, 2):
        batch, side = x.shape[:axis], x.shape[axis]
        if side == _SIDE:
            continue
        weights = jax.image.resize(jnp.eye(side, dtype=x.dtype), (_SIDE, side), "linear")
        rows = x.reshape(math.prod(batch), side, -1)
        weights = jnp.broadcast_to(weights, (len(rows), *weights.shape))
        x = jax.lax.batch_matmul(weights, rows).reshape(*batch, _SIDE, *x.shape[axis + 1 :])
    return x


def _remember(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """Freezes the client's model at the end of its first round."""
    froze, model = received.memory["trained"], received.memory["model"]
    model = where_tree(froze, model, without(trained.variables, COLLECTION))
    return trained.variables, {"model": model, "trained": jnp.ones((), bool)}, ()


def discrepancy(x: jax.Array, y: jax.Array, valid: jax.Array) -> jax.Array:
    r"""Returns MMD^2 f[] of the valid rows of x and y, with equal weights; 0 without valid rows.

    $MMD^2(x, y) = \sum_{ab} s_a s_b k(z_a, z_b)$ with $z = (x, y)$, $s = (w, -w)$, $\sum_a w_a = 1$

    $k(z, z') = \sum_r \exp(-\Vert z - z' \Vert^2 / (r m))$

    r are 2 * 3^k, k = -3 to 1, and m is the mean squared distance, which passes no gradient
    (Gretton et al., JMLR 2012). Rows b of x and y f[B, D] are from sample b; valid is bool[B].
    """
    far = squared_distances(x, x), squared_distances(y, y), squared_distances(x, y)
    return _by_distances(*far, valid)


def _by_distances(
    within_x: jax.Array, within_y: jax.Array, between: jax.Array, valid: jax.Array
) -> jax.Array:
    """Returns the `discrepancy` of vectors with these squared distances, f[B, B] each."""
    shares = valid.astype(between.dtype) / jnp.maximum(valid.sum(dtype=between.dtype), 1)

    def mean(pairs: jax.Array) -> jax.Array:
        return jnp.einsum("a,ab,b->", shares, pairs, shares)

    # The width is the mean over all pairs: a quarter is within x, a quarter within y, half between.
    parts = ((within_x, 1), (within_y, 1), (between, -2))
    width: Any = sum(abs(sign) / 4 * mean(far) for far, sign in parts)
    gaps = (sign * mean(kernel(far, width, RATIOS)) for far, sign in parts)
    return sum(gaps, jnp.zeros_like(width))
