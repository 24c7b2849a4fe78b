"""Makes the batches of a round from a user's own arrays.

    draw = drawing([(images_a, labels_a), (images_b, labels_b)], batch_size=32)
    for number in range(20):
        state, metrics = method.round(state, draw(jax.random.fold_in(key, number)), key)

`fedjax_bn.engine.batches` describes the batches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset
from fedjax_bn.data.label_trees import as_labels, has_masks
from fedjax_bn.data.sampling import ClientData, by_epochs, point_to, stack_clients
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.inputs import UNLABELLED, as_images, random_key


def drawing(
    clients: Sequence[tuple[np.ndarray, Any]], *, batch_size: int = 32, local_epochs: int = 1
) -> Callable[[jax.Array], Batches]:
    """Returns `draw(key) -> batches`, the batches of all clients for one round.

    Every epoch holds each sample of a client once, in a new random order; the last batch may be
    short, and clients with fewer samples end with empty batches. The samples stay on the device.

    Args:
      clients: (images, labels) of each of K clients: images u8[N, H, W, C], which the method's
        `prepare` standardizes, or f[N, ...], which it only casts; labels are integers [N] from 0,
        or masks, see `label_trees.as_labels`.
      batch_size: B, cut to the number of samples of the largest client.
      local_epochs: the same as the method's.

    Raises:
      ValueError: the clients' samples do not suit each other, see `domain.check_dataset`.
    """
    splits = [
        Split(
            as_images(images, f"the images of client {k}"),
            as_labels(labels, f"the labels of client {k}"),
        )
        for k, (images, labels) in enumerate(clients)
    ]
    # Only the check of labels needs it.
    count = (UNLABELLED if has_masks(y) else 1 + int(y.max(initial=0)) for _, y, _ in splits)
    classes = max(count, default=1)
    domains = tuple(Domain(f"client {k}", split, None, split) for k, split in enumerate(splits))
    check_dataset(Dataset("drawing", classes, domains, (0.5,), (0.5,)))
    data = stack_clients(splits)
    longest = data.images.shape[1]
    sample = by_epochs(min(batch_size, longest), (local_epochs,))
    number = jnp.arange(len(splits), dtype=jnp.int32)

    @jax.jit
    def draw(data: ClientData, key: jax.Array) -> Batches:
        batches = point_to(data, sample(data.sizes, number, longest, key))
        del batches["source"]  # as an output of `jit`, the images would be copied
        return batches

    return lambda key: draw(data, random_key(key)) | {"source": data.images}
