"""Runs this library: python -m peer_programs.ours NETWORK FILE."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_bn import models
from fedjax_bn.aggregation import uniform
from fedjax_bn.methods import fedavg
from fedjax_bn.models.torch_weights import from_torch
from peer_programs.rounds import LEARNING_RATE, read, serve


def main(network: str, path: str) -> None:
    """Runs FedAvg, with the library's default way to map clients."""
    arrays, tensors = read(path)
    model = getattr(models, network)(num_classes=10)
    method = fedavg(model, optax.sgd(LEARNING_RATE), weigh=uniform)
    key, valid = jax.random.key(0), np.ones(arrays["label"].shape, bool)
    batches = jax.tree.map(jnp.asarray, {**arrays, "valid": valid})
    variables = jax.tree.map(jnp.asarray, from_torch(model, tensors))
    state = method.init(key, variables, len(valid))

    def a_round() -> np.ndarray:
        nonlocal state
        state, metrics = jax.block_until_ready(method.round(state, batches, key))
        return np.asarray(metrics["loss"])

    serve(a_round)


if __name__ == "__main__":
    main(*sys.argv[1:])
