"""SNR (Jin, Lan, Zeng & Chen, TMM 2021): styles are taken away, and what tells classes restored."""

from collections.abc import Mapping
from typing import Any, Unpack
from zlib import crc32

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.classifier import sizes_of
from fedjax_bn.models.forward import forward
from fedjax_bn.rivals.restitution import COLLECTION, Restored, layer, restoring
from fedjax_bn.rivals.stages import stages_of
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received
from fedjax_bn.task import cross_entropy, masked_mean, require_classifier

PyTree = Any
HEADS = "restitution_heads"  # collection: a classifier of each place, in training only


@bounded
def snr(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    weight: AtLeast0 = 0.01,
    names: str = "",
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedAvg of a network with `rivals.restitution` behind some modules (SNR).

    Clients minimize

        CE + weight sum_places [ l(H(n) - H(x+)) + l(H(x-) - H(n)) ] + weight CE(last place's x+)

    with l(t) = log(1 + exp(-t)). H is the entropy of what a dense head of the place tells of the
    map's mean over positions, a mean over samples: what is restored, x+, is to tell the classes
    better than the normalized n, and what is left out, x-, worse. The layers, the collection
    `restitution`, travel with the model and predict with it; the heads, `restitution_heads`,
    travel too. The reported loss is CE.

    Defaults are those of the authors' code (microsoft/SNR, MIT). Differs from it: batch norms
    train, where theirs keep ImageNet's statistics. The loss needs no domains, so that a client with
    one loses nothing.

    Args:
      model: images -> logits, with batch norms or named modules that give maps f[B, ..., C].
      optimizer: the local optimizer.
      weight: of what the heads tell, at least 0; 0.01 in the authors' code.
      names: behind which modules, see `rivals.stages.stages_of`; "" for the ends of the stages
        layer1 to layer3, as in the authors' code, a DenseNet's transitions, or all batch norms
        that see maps.
      **options: those of `fedavg`.

    Raises:
      ValueError: `weight` is negative, or the task is not classification; at `init`, where the
        model has no such modules; at `round`, where these give no maps.
    """
    learned, rest = learning(model, **options)
    require_classifier("snr", learned.task)
    trained = ("params", COLLECTION, HEADS)
    step = gradient_step(differentiate(restituting(learned, weight), trained), optimizer, trained)
    method = method_of(step, **rest)

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        if COLLECTION not in variables:
            variables = {**variables, **_start(key, model, variables, names)}
        return method.init(key, variables, num_clients)

    return method._replace(init=init)


def restituting(learned: Learning, weight: float) -> Objective:
    """The objective of `snr`, of variables with `restitution` and `restitution_heads`."""

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        del received
        images, valid = learned.read(variables, batch, key), batch["valid"]
        plain = {n: tree for n, tree in variables.items() if n not in (COLLECTION, HEADS)}
        seen: dict[str, Restored] = {}
        with restoring(variables[COLLECTION], seen):
            out = forward(learned.model, plain, images, train=True, valid=valid, key=key)
        loss = learned.task.loss(out.outputs, batch["label"], valid)
        if not seen:
            raise ValueError(
                f"snr restores maps f[B, ..., C], but {', '.join(variables[COLLECTION])} give "
                "none: name other modules (snr.names)"
            )
        told = told_of(seen, variables[HEADS], batch["label"], valid)
        return loss + weight * told.astype(loss.dtype), (loss, out.moved)

    return objective


def told_of(
    seen: Mapping[str, Restored], heads: PyTree, label: jax.Array, valid: jax.Array
) -> jax.Array:
    """The sum over places, and the last one's cross entropy, f[]; see `snr`."""
    total: Any = 0.0
    last: Any = None
    for name, parts in seen.items():
        head = heads[name]
        logits = parts.means @ head["kernel"] + head["bias"]
        normalized, kept, left = (masked_mean(_entropy(x), valid) for x in logits)
        total += jax.nn.softplus(kept - normalized) + jax.nn.softplus(normalized - left)
        last = logits[1]
    return total + cross_entropy(last, label, valid)


def _entropy(logits: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(logits)
    return -(jnp.exp(logs) * logs).sum(-1)


def _start(key: jax.Array, model: Any, variables: Variables, names: str) -> Variables:
    """Layers and heads of all places."""
    places, sizes = stages_of("snr", variables, names), sizes_of(model, variables)

    def head(key: jax.Array, channels: int) -> PyTree:
        shapes, bound = {"kernel": (channels, sizes.classes), "bias": (sizes.classes,)}, channels
        keys = zip(shapes.items(), jax.random.split(key), strict=True)
        return {
            name: jax.random.uniform(own, shape, sizes.dtype, -(bound**-0.5), bound**-0.5)
            for (name, shape), own in keys
        }

    keys = {
        name: jax.random.split(jax.random.fold_in(stream(key, "restitution"), crc32(name.encode())))
        for name in places
    }
    return {
        COLLECTION: {n: layer(keys[n][0], size, sizes.dtype) for n, size in places.items()},
        HEADS: {n: head(keys[n][1], size) for n, size in places.items()},
    }
