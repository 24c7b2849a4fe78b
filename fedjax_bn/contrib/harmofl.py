"""HarmoFL (Jiang, Wang & Dou, AAAI 2022): harmonized images, and flat minima at the clients."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn import aggregation
from fedjax_bn.aggregation import Aggregate, ServerState, ServerUpdate, Weighing, WeighingRule
from fedjax_bn.arguments.ranges import AtLeast0, Channels, bounded
from fedjax_bn.client import Client, Load, LocalUpdate, load_first
from fedjax_bn.contrib.fedsam import sharpness_aware
from fedjax_bn.contrib.parts import require_images
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, Options, learning, method_of, supervised
from fedjax_bn.methods.scaffold import add_messages
from fedjax_bn.models.hooks import Hooked, register
from fedjax_bn.sharing import PyTree, Variables
from fedjax_bn.state import Received

COLLECTION = "amplitude"  # {"mean": f[C]}


@bounded
def harmofl(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    rho: AtLeast0 = 0.05,
    channels: Channels = 3,
    weigh: WeighingRule | Weighing | None = aggregation.uniform,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""FedSAM on images that all have the federation's mean, in training and at test.

    $x' = x - \mathrm{mean}(x) + m$ for each channel, and

    each step moves along $\nabla F(w + \rho g / \Vert g \Vert)$ with $g = \nabla F(w)$

    When a client first takes part, it reveals to the server the mean f[C] of its first batch, once.
    m, the collection `amplitude`, is the plain mean over all clients that have sent theirs; in the
    first round each client uses its own mean as m. Clients have equal weights in a round too
    (`weigh`), as in the authors' code. With rho 0 it is FedAvg of harmonized images.

    As in the authors' code the window of low frequencies has half side 0, the mean alone, and the
    running mean stays that of the first batch; the paper has a window and a momentum.
    Differs from the code: clients may join later; means are of what the model reads and keep their
    sign, which amplitudes lose. `privacy` raises ValueError.

    Args:
      rho: length of the weights' perturbation, at least 0; 0.05 as in the authors' code.
      channels: C of the images that the model reads.
      weigh: the weighing rule.
    """
    if options.get("privacy") is not None:
        # The noise of every round would move the mean amplitude.
        raise ValueError("privacy cannot be used with harmofl: choose another method, as fedbn")
    load = options.get("load")
    learned, federate_options = learning(model, **options)

    def start(key: jax.Array, variables: Variables) -> Variables:
        mean = jnp.zeros(channels, parameter_dtype(variables))
        return {COLLECTION: {"mean": mean}} | variables

    return method_of(
        gradient_step(sharpness_aware(differentiate(supervised(learned)), rho), optimizer),
        memory=lambda shared, personal: jnp.zeros((), bool),
        server=_averaging_means(federate_options.pop("server", None) or aggregation.averaging()),
        around=lambda client: _measuring(client, learned, load),
        travels=COLLECTION,  # because the server sets it
        weigh=weigh,
        start=start,
        **federate_options,
    )


class _Means(NamedTuple):
    """What the server keeps and sends."""

    total: jax.Array  # f[C], the sum of the means that clients have sent, divided by K
    known: jax.Array  # f[], the fraction of the K clients that have sent theirs


def _hook(tree: Variables, images: jax.Array, key: jax.Array | None) -> Hooked:
    """Shifts images f[B, H, W, C] to the federation's means, see `models.hooks`."""
    return Hooked(harmonize(images, tree["mean"]))


register(COLLECTION, _hook)


def harmonize(images: jax.Array, mean: jax.Array) -> jax.Array:
    """Returns images f[B, H, W, C], each shifted to the means f[C] over height and width."""
    require_images("harmofl", images, len(mean))
    # A shift alone: the window of the spectrum holds nothing but the mean.
    return images - images.mean((1, 2), keepdims=True) + mean.astype(images.dtype)


def _measuring(client: Client, learned: Learning, load: Load | None) -> Client:
    """Returns the client that sends the mean of its first batch when it first takes part."""

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        batch = load_first(load, batches, stream(key, "mean amplitude"))
        valid = batch["valid"]
        federation_mean, sent = received.shared[COLLECTION]["mean"], received.memory.method
        # Over the pixels of valid images; 0 without any. `load_first` blanks padding, but keeps it.
        means = learned.prepare(batch["image"], federation_mean.dtype).mean((1, 2))
        count = jnp.maximum(valid.sum(dtype=means.dtype), 1)
        client_mean = jnp.where(valid[:, None], means, 0).sum(0) / count
        client_mean = client_mean.astype(federation_mean.dtype)
        # In the first round the federation has no mean yet.
        mean = jnp.where(received.server.known > 0, federation_mean, client_mean)
        shared = {**received.shared, COLLECTION: {"mean": mean}}
        update = client.run(received._replace(shared=shared), batches, key)
        is_first = ~sent & valid.any()
        message = _Means(jnp.where(is_first, client_mean, 0), is_first.astype(client_mean.dtype))
        memory = update.memory._replace(method=sent | is_first)
        return update._replace(memory=memory, message=message)

    return client._replace(run=run)


def _averaging_means(server: ServerUpdate) -> ServerUpdate:
    """Returns the server whose `amplitude` is the mean over all clients that have sent theirs."""

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        mean = shared[COLLECTION]["mean"]
        zeros = _Means(jnp.zeros_like(mean), jnp.zeros((), mean.dtype))
        return ServerState(sent=zeros, kept=server.init(shared, personal))

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        means = add_messages(state.sent, aggregate)
        # The method's own step comes first, because it averages the collection like any leaf; its
        # result is then replaced.
        shared, inner = server.update(shared, aggregate._replace(message=()), state.kept)
        any_sent = means.known > 0
        mean = jnp.where(any_sent, means.total / jnp.where(any_sent, means.known, 1), 0)
        return {**shared, COLLECTION: {"mean": mean}}, ServerState(sent=means, kept=inner)

    return ServerUpdate(init, update, message_weight=aggregation.equal_messages)
