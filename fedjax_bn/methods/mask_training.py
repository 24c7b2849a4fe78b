"""How a method's feature masks are trained, as a word spells it: where, by what, within what."""

from collections.abc import Callable, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.choices import read_choice
from fedjax_bn.arguments.ranges import FINITE, Above0, AtLeast0, Range, Share
from fedjax_bn.arguments.text import brief
from fedjax_bn.models.masks import Masks


def mask_bounds(text: str) -> tuple[float, float]:
    """Returns LOW and HIGH of "LOW,HIGH".

    Raises:
      ValueError: they are not finite numbers, or LOW is not below HIGH.
    """
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = 0.0
    if not (FINITE.holds(low) and FINITE.holds(high) and low < high):
        raise ValueError(f"bounds={brief(text)} must be {BOUNDS.text}")
    return low, high


def _are_bounds(text: str) -> bool:
    try:
        return not text or bool(mask_bounds(text))
    except ValueError:
        return False


BOUNDS = Range("LOW,HIGH with LOW below HIGH, such as 0,1; empty for none", _are_bounds)
Bounds = Annotated[str, BOUNDS]


def mask_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """The names of "features" or "features,layer4_1", or of a sequence of them.

    Raises:
      ValueError: there are none, or one comes twice.
    """
    found = tuple(map(str.strip, names.split(","))) if isinstance(names, str) else tuple(names)
    if not found or "" in found or len(set(found)) < len(found):
        raise ValueError(
            f"fedcd: names={names!r} must name something to mask, each once, such as 'features'"
        )
    return found


def keep_within(bounds: str | Sequence[float]) -> Callable[[Masks], Masks]:
    """The function that moves masks to the nearest ones within "LOW,HIGH"; for "" none moves.

    Raises:
      ValueError: LOW is not below HIGH.
    """
    if isinstance(bounds, str) and not bounds:
        return lambda masks: masks
    low, high = mask_bounds(bounds if isinstance(bounds, str) else ",".join(map(str, bounds)))
    return lambda masks: jax.tree.map(lambda mask: jnp.clip(mask, low, high), masks)


def mask_optimizer_of(text: str) -> optax.GradientTransformation:
    """What `sgd:learning_rate=0.1:weight_decay=0.01`, `adam:learning_rate=0.001` or `none` spells.

    Raises:
      ValueError: an unknown name or key, or a value of the wrong type or out of its range.
    """
    make, options = read_choice(f"fedcd: mask_optimizer={text!r}", text, _OPTIMIZERS)
    return make(**options)


def _sgd(
    learning_rate: Above0, momentum: Share = 0.0, weight_decay: AtLeast0 = 0.0
) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(weight_decay)
    return optax.chain(decay, optax.sgd(learning_rate, momentum or None))


def _adam(learning_rate: Above0, weight_decay: AtLeast0 = 0.0) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.adam(learning_rate))


_OPTIMIZERS = {"sgd": _sgd, "adam": _adam, "none": optax.set_to_zero}
