"""A program as a user writes it, for the type checker alone (`make types`)."""

from typing import assert_type

import jax
import optax

from fedjax_bn.adaptation import Adaptation, tsmobn
from fedjax_bn.aggregation import risk_extrapolation, weighted_mean
from fedjax_bn.federation import (
    Broadcast,
    FederatedMethod,
    FederatedState,
    Own,
    Upload,
    broadcast_of,
    client_variables,
    global_variables,
    own_of,
    traffic,
    with_own,
)
from fedjax_bn.methods import fedbn, fedprox
from fedjax_bn.models import DigitCNN, ResNet, ResNet18
from fedjax_bn.sharing import Variables, all_but_batch_norm


def train(images: jax.Array, labels: jax.Array) -> Variables:
    """A round of FedBN."""
    key, model = jax.random.key(0), DigitCNN(num_classes=3)
    method = fedbn(model, optax.sgd(0.1))
    assert_type(method, FederatedMethod)
    state = method.init(key, model.init(key, images[0, 0]), images.shape[0])
    assert_type(state, FederatedState)
    batches = {"image": images, "label": labels, "valid": labels >= 0}
    state, metrics = method.round(state, batches, key)
    assert_type(metrics["loss"], jax.Array)
    assert_type(traffic(method, state, batches), dict[str, int])
    assert_type(client_variables(state), Variables)
    return global_variables(state)


def one_by_one(state: FederatedState, batches: dict[str, jax.Array], key: jax.Array) -> Upload:
    """A client's part of a round."""
    model: ResNet = ResNet18(num_classes=7)
    method = fedprox(
        model, optax.sgd(0.1), mu=0.1, share=all_but_batch_norm, weigh=risk_extrapolation(eta=0.5)
    )
    sent = broadcast_of(state)
    assert_type(sent, Broadcast)
    kept, upload = method.client(sent, own_of(state, 0), batches, key)
    assert_type(kept, Own)
    state = method.server(with_own(state, 0, kept), weighted_mean(upload, upload.size))
    return upload


def serve(received: Variables, images: jax.Array) -> jax.Array:
    """An unseen client's predictions."""
    adaptation = tsmobn(DigitCNN(), momentum=0.9)
    assert_type(adaptation, Adaptation)
    logits, _ = adaptation.predict(received, adaptation.init(received), images)
    return logits
