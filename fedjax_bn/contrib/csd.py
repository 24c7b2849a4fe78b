"""CSD (Piratla, Netrapalli & Sarawagi, ICML 2020): a classifier that is common to all domains."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, Views, bounded
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, Value, minimizing
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.classifier import ClassifiedBy, Classify, require_linear, sizes_of
from fedjax_bn.models.forward import forward
from fedjax_bn.sharing import Variables, without
from fedjax_bn.state import Received

SPECIFIC, OWN = "specific", "domain"  # collections: shared by all clients, and each client's own


@bounded
def csd(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    directions: Views = 1,
    specific: AtLeast0 = 1.0,
    penalty: AtLeast0 = 1.0,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Each client k learns a common classifier, and one that is specific to its own domain.

    $CE(f W_0) + specific \; CE(f W_k) + penalty \; \mathrm{mean} (G - I)^2$

    $W_k = \tanh(c) W_0 + \sum_j \tanh(e_{kj}) W_j$ for j = 1, ..., directions; likewise the biases

    W_0 is the model's own classifier, which all clients share; only W_0 predicts. G is the Gram
    matrix of a class's columns in W_0, W_1, ...; the mean is over its entries and the classes.
    c and the specific W_j, the collection `specific`, travel with the model; e_k, the collection
    `domain`, stays with client k, whatever `share` is. The reported loss is CE(f W_0).

    Differs from the authors' code: W_0 starts like the model's own classifier.

    Args:
      model: images -> logits, with a dense classifier, which `fedjax_bn.models.classifier` defines.
      directions: number of specific classifiers, the rank minus one; 1 in the authors' PACS code.
      specific: weight of the domain's cross entropy, at least 0; 1 in the authors' PACS code.
      penalty: weight of the penalty, at least 0; 1 in the authors' PACS code.
    """
    learned, federate_options = learning(model, classifier="csd", **options)
    objective = decomposed_objective(learned, specific, penalty)

    def start(key: jax.Array, variables: Variables) -> Variables:
        # The authors' start, as N(mean, standard deviation): W_j and their biases from N(0, 0.1),
        # c from N(0.1, 1e-4), e from N(0, 1e-4).
        sizes = sizes_of(model, variables)
        keys = jax.random.split(stream(key, "decomposed head"), 4)

        def draw(i: int, *shape: int) -> jax.Array:
            return jax.random.normal(keys[i], shape, sizes.dtype)

        layers = {
            "kernel": 0.1 * draw(0, directions, sizes.features, sizes.classes),
            "bias": 0.1 * draw(1, directions, sizes.classes),
            "common": 0.1 + 1e-4 * draw(2),
        }
        return {SPECIFIC: layers, OWN: {"weights": 1e-4 * draw(3, directions)}} | variables

    step = minimizing(objective, optimizer, ("params", SPECIFIC, OWN))
    return method_of(step, keeps=OWN, start=start, **federate_options)


def decomposed_objective(learned: Learning, specific: float, penalty: float) -> Objective:
    """Returns the objective of `csd`, for variables with `specific` and `domain`."""

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        plain = without(variables, SPECIFIC, OWN)
        require_linear("csd", learned.model, plain, images)
        model, options = ClassifiedBy(learned.model, _with_weights), {"valid": valid, "key": key}
        out = forward(model, plain, images, train=True, wanted=["features"], **options)
        # The rows after the batch are the logits of unit vectors and of 0, see `_with_weights`.
        common, kernel = out.outputs[: len(valid)], out.outputs[len(valid) : -1] - out.outputs[-1]
        layers, weights = variables[SPECIFIC], jnp.tanh(variables[OWN]["weights"])
        specific_logits = jnp.einsum("bf,jfc->jbc", out.features, layers["kernel"])
        specific_logits += layers["bias"][:, None]
        client_logits = jnp.tanh(layers["common"]) * common
        client_logits += jnp.tensordot(weights, specific_logits, 1)
        loss, by_domain = (learned.loss(logits, batch) for logits in (common, client_logits))
        # W_0 is read from the outputs, so that the penalty's gradient reaches the classifier.
        kernels = jnp.concatenate([kernel[None], layers["kernel"]])
        gram = jnp.einsum("kfc,lfc->ckl", kernels, kernels)  # one matrix for each class
        distance = jnp.square(gram - jnp.eye(len(kernels), dtype=gram.dtype)).mean()
        return loss + specific * by_domain + penalty * distance, (loss, out.moved)

    return objective


def _with_weights(classify: Classify, features: jax.Array) -> jax.Array:
    """Returns the logits of the features, then of each unit vector, then of 0 (the bias)."""
    size = features.shape[-1]
    # The last row is 0, whose logits are the bias alone; any affine classifier is read so.
    units = jnp.eye(size + 1, size, dtype=features.dtype)
    return classify(jnp.concatenate([features, units]))
