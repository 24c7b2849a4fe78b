"""A round's batches: their form, their padding, and what `valid` implies.

    {"image": f|u8[C, S, B, ...] (or i32[C, S, B], numbers of samples in "source"),
     "label": classes [C, S, B], whole numbers of any dtype, or a tree of arrays [C, S, B, ...],
     "valid": bool[C, S, B],
     "source": a tree of arrays [C, N, ...], in which `load` finds samples (optional),
     "participates": bool[C] (optional; all),
     "size": i32[C], samples that a client owns (optional; its valid samples of one epoch),
     "validation": a tree of arrays [C, ...], a client's own (optional),
     "client": i32[C], the client of each row, and "population": i32[], the number of all clients
         (optional; the rows are all clients, in order)}

S steps are E equal local epochs. On a mesh of devices rows of padding may follow, up to a multiple
of its clients axis: they count nowhere. For images and labels see `fedjax_bn.engine.inputs`.
"""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
Batches = dict[str, PyTree]

REQUIRED = ("image", "label", "valid")
_OPTIONAL = ("source", "participates", "size", "validation", "client", "population")
_BY_CLIENT = ("participates", "size", "client")


def rows_of(batches: Batches) -> int:
    """Returns the number of rows of batches; 0 if they lack `valid`."""
    shape = getattr(batches.get("valid"), "shape", ())
    return shape[0] if shape else 0


def check_batches(batches: Batches, rows: int, epochs: int) -> None:
    """Checks keys and shapes of a round's batches.

    Args:
      batches: as above.
      rows: C, the rows of the state.
      epochs: E.

    Raises:
      ValueError: a key is missing or unknown, or a shape does not fit; the message names it.
    """
    missing, unknown = set(REQUIRED) - set(batches), set(batches) - {*REQUIRED, *_OPTIONAL}
    if missing or unknown:
        raise ValueError(
            f"batches lack {sorted(missing)} and have unknown {sorted(unknown)}: give "
            f"{', '.join(REQUIRED)}, optionally {', '.join(_OPTIONAL)}"
        )
    if "client" in batches and "population" not in batches:
        raise ValueError(
            "batches['client'] says who the rows are: say in batches['population'] how many "
            "clients there are in all"
        )
    shape = jax.tree.leaves(batches["label"])[0].shape[:3]
    for leaf in jax.tree.leaves(batches["label"]):
        if len(leaf.shape) < 3 or leaf.shape[:3] != (rows, *shape[1:]):
            raise ValueError(f"batches['label'] has shape {leaf.shape}, not [K={rows}, S, B]")
    for name in ("image", "valid"):
        if batches[name].shape[:3] != shape:
            raise ValueError(
                f"batches['{name}'] has shape {batches[name].shape}, which does not begin with "
                f"that of 'label', {shape}"
            )
    for name in _BY_CLIENT:
        if name in batches and batches[name].shape != (rows,):
            raise ValueError(f"batches['{name}'] has shape {batches[name].shape}, not [K={rows}]")
    for name in ("source", "validation"):
        for leaf in jax.tree.leaves(batches.get(name, ())):
            if leaf.shape[:1] != (rows,):
                raise ValueError(
                    f"batches['{name}'] has an array of shape {leaf.shape}, not [K={rows}, ...]"
                )
    if shape[1] % epochs:
        raise ValueError(
            f"{shape[1]} steps are not {epochs} equal local epochs: pad every epoch to the same "
            "number of steps with valid=False"
        )


def blank_padding(batch: Batches) -> Batches:
    """Returns the batch with zeros in image and label where `valid` bool[...] is False.

    A weight of 0 in the loss is not enough: 0 times a NaN of the padding is NaN in the gradient.
    """
    valid = batch["valid"]

    def blank(leaf: jax.Array) -> jax.Array:
        mask = valid.reshape(*valid.shape, *(1,) * (leaf.ndim - valid.ndim))
        return jnp.where(mask, leaf, jnp.zeros((), leaf.dtype))

    return batch | {name: jax.tree.map(blank, batch[name]) for name in ("image", "label")}


def owned_samples(batches: Batches, epochs: int) -> jax.Array:
    """Returns i32[], the samples of one client, by default the valid ones of its largest epoch.

    Args:
      batches: one client's, "valid" bool[S, B], perhaps with "size" i32[].
      epochs: E.
    """
    if "size" in batches:
        return batches["size"]
    return batches["valid"].reshape(epochs, -1).sum(1, dtype=jnp.int32).max()


def last_epoch(valid: jax.Array, epochs: int) -> jax.Array:
    """Returns bool[S], the steps of a client's last local epoch with a valid sample.

    A client that makes fewer local epochs than others has epochs without valid samples.

    Args:
      valid: bool[S, B], S steps of E equal epochs.
      epochs: E.
    """
    real = valid.reshape(epochs, -1).any(1)
    last = epochs - 1 - jnp.argmax(real[::-1])
    return jnp.arange(valid.shape[0]) // (valid.shape[0] // epochs) == last
