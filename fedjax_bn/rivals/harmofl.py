"""HarmoFL (Jiang, Wang & Dou, AAAI 2022): images harmonized, and flat minima at the clients."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import (
    Aggregate,
    ServerState,
    ServerUpdate,
    Weighing,
    WeighingRule,
    averaging,
    equal_messages,
    uniform,
)
from fedjax_bn.arguments.ranges import AtLeast0, Channels, bounded
from fedjax_bn.client import Client, Load, LocalUpdate, look_up
from fedjax_bn.engine.batches import blank_padding
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, Options, learning, method_of, supervised
from fedjax_bn.rivals import amplitude
from fedjax_bn.rivals.fedsam import sharpness_aware
from fedjax_bn.sharing import Variables, everything
from fedjax_bn.state import Received

PyTree = Any


@bounded
def harmofl(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    rho: AtLeast0 = 0.05,
    channels: Channels = 3,
    weigh: WeighingRule | Weighing | None = uniform,
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedSAM on images whose means are the federation's, in training and at test.

        x' = x - mean(x) + m,   and a step along grad F(w + rho g / ||g||),   g = grad F(w)

    When a client first takes part, it sends the mean f[C] of its own first batch; m, the collection
    `amplitude`, is the mean over all clients that have sent theirs, each of which counts alike. As
    long as there is none (in the first round) a client takes its own for m. So besides the model a
    client shows the server one mean of its pixels a channel, once. In a round clients count alike
    too (`weigh`), as in the authors' code. With rho 0 it is FedAvg of harmonized images.

    It is the authors' code, whose window of low frequencies has half side 0, the mean alone, and
    whose running mean stays that of the first batch, where the paper has a window and a momentum.
    Differs from it: clients may join later, where there all take part in the first round; means are
    of what the model reads and keep their sign, where amplitudes have none (of images above 0 they
    are the same).

    Args:
      model: f[B, H, W, C] -> outputs.
      optimizer: the local optimizer.
      rho: of the weights' perturbation, at least 0; 0.05 as in the authors' code.
      channels: of the images that the model reads, C.
      weigh: the weighing rule.
      **options: those of `fedavg`.

    Raises:
      ValueError: an argument is out of its range, or there is privacy; at `round`, where images
        have other channels.
    """
    if options.get("privacy") is not None:
        raise ValueError(
            "privacy does not go with harmofl, whose mean amplitude is measured once and kept, "
            "but would be moved by the noise of every round: choose another method, such as "
            "fedbn or fedprox"
        )
    load = options.get("load")
    learned, rest = learning(model, **options)
    gradient = sharpness_aware(differentiate(supervised(learned)), rho)
    share = rest.pop("share", everything)
    method = method_of(
        gradient_step(gradient, optimizer),
        memory=lambda shared, personal: jnp.zeros((), bool),
        server=_averaging_means(rest.pop("server", None) or averaging()),
        around=lambda client: _measuring(client, learned, load or look_up),
        share=lambda variables: {
            **share({name: tree for name, tree in variables.items() if name != _NAME}),
            _NAME: {"mean": True},
        },
        weigh=weigh,
        **rest,
    )

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        if _NAME not in variables:
            mean = jnp.zeros(channels, parameter_dtype(variables))
            variables = {**variables, _NAME: {"mean": mean}}
        return method.init(key, variables, num_clients)

    return method._replace(init=init)


_NAME = amplitude.COLLECTION


class Means(NamedTuple):
    """What the server keeps and sends.

    Attributes:
      total: f[C], sum over all K clients of what they have sent, divided by K.
      known: f[], the share of the K clients that have sent theirs.
    """

    total: jax.Array
    known: jax.Array


def _measuring(client: Client, learned: Learning, load: Load) -> Client:
    """The client, which sends the mean of its first batch when it first takes part."""

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        own_batches = {name: tree for name, tree in batches.items() if name != "source"}
        first = jax.tree.map(lambda leaf: leaf[0], own_batches)
        own_key = stream(key, "mean amplitude")
        batch = blank_padding(load(batches.get("source"), first, own_key))
        old, sent = received.shared[_NAME]["mean"], received.memory.method
        images = learned.prepare(batch["image"], old.dtype)
        own = amplitude.mean_of(images, batch["valid"]).astype(old.dtype)
        mean = jnp.where(received.server.known > 0, old, own)
        shared = {**received.shared, _NAME: {"mean": mean}}
        update = client.run(received._replace(shared=shared), batches, key)
        new = ~sent & batch["valid"].any()
        message = Means(jnp.where(new, own, 0), new.astype(old.dtype))
        memory = update.memory._replace(method=sent | new)
        return update._replace(memory=memory, message=message)

    return client._replace(run=run)


def _averaging_means(server: ServerUpdate) -> ServerUpdate:
    """The server, whose amplitude is the mean over all clients that have sent theirs."""

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        mean = shared[_NAME]["mean"]
        nobody = Means(jnp.zeros_like(mean), jnp.zeros((), mean.dtype))
        return ServerState(sent=nobody, kept=server.init(shared, personal))

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        share = aggregate.share
        means = jax.tree.map(
            lambda old, new: old + (new * share.astype(new.dtype)).astype(old.dtype),
            state.sent,
            aggregate.message,
        )
        shared, inner = server.update(shared, aggregate._replace(message=()), state.kept)
        some = means.known > 0
        mean = jnp.where(some, means.total / jnp.where(some, means.known, 1), 0)
        return {**shared, _NAME: {"mean": mean}}, ServerState(sent=means, kept=inner)

    return ServerUpdate(init, update, message_weight=equal_messages)
