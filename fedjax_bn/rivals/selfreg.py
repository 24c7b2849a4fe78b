"""SelfReg (Kim et al., ICCV 2021): samples of one class are to look alike, without negatives."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import Above0, AtLeast0, bounded
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.classifier import sizes_of
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization.layer import moments
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean, require_classifier

PyTree = Any
COLLECTION = "projection"
_LAYERS = 3
_WIDE = 2048  # features that are projected without becoming more
_EPSILON = 1e-5  # PyTorch's of a batch norm


@bounded
def selfreg(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    feature: AtLeast0 = 0.3,
    beta: Above0 = 0.5,
    **options: Unpack[Options],
) -> FederatedMethod:
    """Clients minimize CE + min(CE, 1) (logits' gap + feature times the features' gap).

        gap(o) = l MSE(o, o2) + (1 - l) MSE(o, l o2 + (1 - l) o3),   l ~ Beta(beta, beta) a batch
        gap(f) = l MSE(f, q2) + (1 - l) MSE(f, l q2 + (1 - l) q3)

    o are the logits, f the features and q their projection by three dense layers with batch norm; 2
    and 3 are those of two other samples of the same class in the batch, by permutations. The factor
    min(CE, 1) passes no gradient. The projection, the collection `projection`, travels with the
    model and is no part of what predicts. The reported loss is CE.

    It is DomainBed's form (Gulrajani & Lopez-Paz 2021). The authors' averaging of weights and their
    curriculum over domains, of which a client has one, are not here.

    Args:
      model: images -> logits; `fedjax_bn.models.features` says what its features are.
      optimizer: the local optimizer.
      feature: weight of the features' gap, at least 0; 0.3 as in DomainBed.
      beta: of the distribution of l, above 0; 0.5 as in DomainBed.
      **options: those of `fedavg`.

    Raises:
      ValueError: an argument is out of its range, or the task is not classification; at `init`,
        where the size of the features cannot be found.
    """
    learned, rest = learning(model, **options)
    require_classifier("selfreg", learned.task)
    trained = ("params", COLLECTION)
    objective = self_regularized(learned, feature, beta)
    method = method_of(gradient_step(differentiate(objective, trained), optimizer, trained), **rest)

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        if COLLECTION not in variables:
            layers = _projection(stream(key, "projection"), model, variables)
            variables = {**variables, COLLECTION: layers}
        return method.init(key, variables, num_clients)

    return method._replace(init=init)


def self_regularized(learned: Learning, feature: float, beta: float) -> Objective:
    """The objective of `selfreg`, of variables with `projection`."""

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        del received
        images, label, valid = learned.read(variables, batch, key), batch["label"], batch["valid"]
        plain = {name: tree for name, tree in variables.items() if name != COLLECTION}
        out = forward(
            learned.model, plain, images, train=True, valid=valid, key=key, wanted=["features"]
        )
        loss = learned.task.loss(out.outputs, label, valid)
        first_key, second_key, share_key = jax.random.split(stream(key, "pairs"), 3)
        pair = [alike(own, label, valid) for own in (first_key, second_key)]
        share = jax.random.beta(share_key, beta, beta, (), loss.dtype)
        projected = project(variables[COLLECTION], out.features, valid)
        gap = _gap(out.outputs, out.outputs, pair, share)
        gap += feature * _gap(out.features, projected, pair, share)
        factor = jax.lax.stop_gradient(jnp.minimum(loss, 1))
        return loss + factor * masked_mean(gap, valid), (loss, out.moved)

    return objective


def _gap(x: jax.Array, others: jax.Array, pair: list[jax.Array], share: jax.Array) -> jax.Array:
    """l (x - o2)^2 + (1 - l) (x - (l o2 + (1 - l) o3))^2, mean over entries, f[B]."""
    two, three = (others[index] for index in pair)
    mixed = share * two + (1 - share) * three
    near, far = (jnp.square(x - other).mean(-1) for other in (two, mixed))
    return share * near + (1 - share) * far


def alike(key: jax.Array, label: jax.Array, valid: jax.Array) -> jax.Array:
    """Another valid sample of the same class for each, i32[B], by a permutation of each class.

    It may be the sample itself; of a padding sample it is a padding one.
    """
    kind = jnp.where(valid, label, jnp.iinfo(label.dtype).max)
    random = jax.random.uniform(key, label.shape)
    # The same ranks in both orders are of the same class.
    to, of = jnp.lexsort((random, kind)), jnp.argsort(kind, stable=True)
    return jnp.zeros_like(to).at[of].set(to)


def project(layers: PyTree, x: jax.Array, valid: jax.Array) -> jax.Array:
    """f[B, F] -> f[B, F]: dense and batch norm three times, with ReLU between them.

    Batch norms take the moments of the valid samples, as the projection is used in training alone.
    """
    for i in range(_LAYERS):
        layer = {name: leaf.astype(x.dtype) for name, leaf in layers[f"layer{i + 1}"].items()}
        x = x @ layer["kernel"] + layer["dense_bias"]
        mean, var, _ = moments(x, valid)
        x = (x - mean) * jax.lax.rsqrt(var + _EPSILON) * layer["scale"] + layer["bias"]
        x = x if i + 1 == _LAYERS else jax.nn.relu(x)
    return x


def _projection(key: jax.Array, model: Any, variables: Variables) -> PyTree:
    sizes = sizes_of(model, variables)
    wide = sizes.features if sizes.features == _WIDE else 2 * sizes.features
    widths = (sizes.features, wide, wide, sizes.features)

    def layer(key: jax.Array, inputs: int, outputs: int) -> PyTree:
        kernel_key, bias_key = jax.random.split(key)
        bound = inputs**-0.5
        return {
            "kernel": jax.random.uniform(kernel_key, (inputs, outputs), sizes.dtype, -bound, bound),
            "dense_bias": jax.random.uniform(bias_key, (outputs,), sizes.dtype, -bound, bound),
            "scale": jnp.ones(outputs, sizes.dtype),
            "bias": jnp.zeros(outputs, sizes.dtype),
        }

    keys = jax.random.split(key, _LAYERS)
    return {f"layer{i + 1}": layer(keys[i], *widths[i : i + 2]) for i in range(_LAYERS)}
