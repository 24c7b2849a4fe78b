"""What methods compute beside passes through the network, as programs of their own.

`method_costs` times them in turn with the rounds and adds them to what it predicts.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_bn.rivals.l2d import _start_stylist, _stylize

SHARE = 0.6  # of the new style, the default of `methods.l2d`


def styles(batches: dict[str, jax.Array]) -> Callable[[], object]:
    """The stylist of L2D, of each step of a round: new styles, and the gradient by fixed ones."""

    def step(layers: dict, given: tuple[jax.Array, jax.Array]) -> tuple[dict, jax.Array]:
        images, key = given
        images = images.astype(jnp.float32) / 255
        styled = _stylize(layers, images, SHARE, key)
        slope = jax.grad(lambda layers: _stylize(layers, images, SHARE).mean())(layers)
        return jax.tree.map(jnp.subtract, layers, slope), styled.mean()

    def round(layers: dict, images: jax.Array, keys: jax.Array) -> tuple[dict, jax.Array]:
        return jax.lax.scan(step, layers, (images, keys))

    images = batches["image"].reshape(-1, *batches["image"].shape[2:])
    layers = _start_stylist(jax.random.key(3), images.shape[-1], jnp.float32)
    given = layers, images, jax.random.split(jax.random.key(4), len(images))
    compiled = jax.jit(round).lower(*given).compile()

    def run() -> None:
        jax.block_until_ready(compiled(*given))

    run()
    return run


PARTS = {"l2d": styles}
