"""HarmoFL (Jiang, Wang & Dou, AAAI 2022): images harmonized, and flat minima at the clients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import uniform
from fedjax_bn.batches import blank_padding
from fedjax_bn.client import Client, Load, LocalUpdate, look_up
from fedjax_bn.dtypes import parameter_dtype
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, differentiate, gradient_step
from fedjax_bn.methods.fedsam import sharpness_aware
from fedjax_bn.methods.learning import Learning, learning, method_of, supervised
from fedjax_bn.models import amplitude
from fedjax_bn.ranges import AtLeast0, Channels, bounded
from fedjax_bn.sharing import Variables, everything
from fedjax_bn.state import Received

PyTree = Any
_MEASURING = 2**31 + 4  # what a round's key is folded with for the first batch


@bounded
def harmofl(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    rho: AtLeast0 = 0.05,
    channels: Channels = 3,
    **options: Any,
) -> FederatedMethod:
    """FedSAM on images whose means are the federation's, in training and at test.

        x' = x - mean(x) + m,   and a step along grad F(w + rho g / ||g||),   g = grad F(w)

    In the first round a client takes for m f[C] the mean of its own first batch and uploads it; the
    mean over clients, the collection `amplitude`, is then everyone's and never changes. So besides
    the model a client shows the server one mean of its pixels a channel, once. Clients count alike
    (`weigh`), as in the authors' code. With rho 0 it is FedAvg of harmonized images.

    It is the authors' code, whose window of low frequencies has half side 0, the mean alone, and
    whose running mean stays that of the first batch, where the paper has a window and a momentum.
    Differs from it: means are of what the model reads and keep their sign, where amplitudes have
    none (of images above 0 they are the same).

    Args:
      model: f[B, H, W, C] -> outputs.
      optimizer: the local optimizer.
      rho: of the weights' perturbation, at least 0; 0.05 as in the authors' code.
      channels: of the images that the model reads, C.
      **options: those of `fedavg`; `weigh` is `uniform` by default.

    Raises:
      ValueError: an argument is out of its range; at `round`, where images have other channels.
    """
    load = options.get("load")
    learned, options = learning(model, **options)
    gradient = sharpness_aware(differentiate(supervised(learned)), rho)
    share = options.pop("share", everything)
    method = method_of(
        gradient_step(gradient, optimizer),
        around=lambda client: _measuring(client, learned, load or look_up),
        share=lambda variables: {
            **share({name: tree for name, tree in variables.items() if name != _NAME}),
            _NAME: {"mean": True},
        },
        **{"weigh": uniform} | options,
    )

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        if _NAME not in variables:
            mean = jnp.zeros(channels, parameter_dtype(variables))
            variables = {**variables, _NAME: {"mean": mean}}
        return method.init(key, variables, num_clients)

    return method._replace(init=init)


_NAME = amplitude.COLLECTION


def _measuring(client: Client, learned: Learning, load: Load) -> Client:
    """The client, which in the first round begins with the mean of its first batch."""

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        own_batches = {name: tree for name, tree in batches.items() if name != "source"}
        first = jax.tree.map(lambda leaf: leaf[0], own_batches)
        own_key = jax.random.fold_in(key, _MEASURING)
        batch = blank_padding(load(batches.get("source"), first, own_key))
        old = received.shared[_NAME]["mean"]
        images = learned.prepare(batch["image"], old.dtype)
        own = amplitude.mean_of(images, batch["valid"]).astype(old.dtype)
        mean = jnp.where(received.round > 0, old, own)
        shared = {**received.shared, _NAME: {"mean": mean}}
        return client.run(received._replace(shared=shared), batches, key)

    return client._replace(run=run)
