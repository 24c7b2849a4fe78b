"""FedLWS (Shi et al., ICLR 2025): the aggregated model is shrunk, layer by layer."""

from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import Weighing, WeighingRule, by_size
from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.engine.backend import where_tree
from fedjax_bn.engine.devices import sum_over
from fedjax_bn.engine.dtypes import wide
from fedjax_bn.engine.weighing import normalized, plain, weighted
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods.fedavg import fedavg
from fedjax_bn.methods.learning import Options
from fedjax_bn.sharing import PyTree, path_names


@bounded
def layer_shrinking(
    *, beta: AtLeast0 = 0.03, least: AtLeast0 = 0.01, most: AtLeast0 = 0.2
) -> Weighing:
    r"""Returns the weighing rule of FedLWS, for any method: a mean that is shrunk in each layer.

    $x' = \bar y \; \Vert x \Vert / (\Vert x \Vert + \tau \Vert \bar y - x \Vert)$

    $\tau = \mathrm{clip}(\beta \, \mathrm{mean}_k \Vert y_k - m \Vert, least, most)$

    for each layer, the parameters x of one module, with the uploads y_k of the clients that count,
    their mean by size and their plain mean m. A layer of zeros takes the mean as it is. In the
    authors' code (ChanglongShi/FedLWS) a layer ends at each name with "bias", and running
    statistics shrink too; where every module has a kernel and a bias both agree.

    Args:
      beta: the scale of tau, at least 0; 0.03 in the authors' code.
      least, most: limits of tau, at least 0; 0.01 and 0.2 in the authors' code. With 0 and 0 it is
        the mean by size.
    """

    def combine(stacked: PyTree, start: PyTree, weights: jax.Array) -> tuple[PyTree, jax.Array]:
        counts, alike = weights > 0, normalized(weights > 0)
        mean, center = (sum_over(weighted, stacked, share) for share in (weights, alike))

        def deviation(client: tuple[PyTree, jax.Array]) -> dict[tuple[str, ...], jax.Array]:
            leaves, counts = client
            leaves = where_tree(counts, jax.tree.map(wide, leaves), center["params"])
            return _norms(jax.tree.map(jnp.subtract, leaves, center["params"]))

        deviations = jax.lax.map(deviation, (stacked["params"], counts))
        received = jax.tree.map(wide, start["params"])
        sizes = _norms(received)
        moves = _norms(jax.tree.map(jnp.subtract, mean["params"], received))

        def shrunk(path: tuple, leaf: jax.Array) -> jax.Array:
            layer = path_names(path[:-1])
            size, spread = sizes[layer], (alike.astype(leaf.dtype) * deviations[layer]).sum()
            far = jnp.clip(beta * spread, least, most) * moves[layer]
            return leaf * jnp.where(size > 0, size / jnp.where(size > 0, size + far, 1), 1)

        return mean | {"params": jax.tree.map_with_path(shrunk, mean["params"])}, weights

    return Weighing(lambda num_clients: (), plain(by_size), combine=combine)


def _norms(params: PyTree) -> dict[tuple[str, ...], jax.Array]:
    """Returns the norm f[] of each module's parameters, by the module's path."""
    squares: dict[tuple[str, ...], Any] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        layer = path_names(path[:-1])
        squares[layer] = squares.get(layer, 0) + jnp.square(leaf).sum()
    return {layer: jnp.sqrt(square) for layer, square in squares.items()}


@bounded
def fedlws(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    weigh: Annotated[WeighingRule | Weighing | None, layer_shrinking] = None,
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedAvg whose server shrinks each layer of the mean: `weigh` is `layer_shrinking()`."""
    return fedavg(model, optimizer, weigh=weigh or layer_shrinking(), **options)
