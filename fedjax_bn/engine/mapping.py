"""Maps a function of one client over all clients: one after another, at once, or n at a time.

The strategy changes speed and memory, but no result beyond the order of sums. On CPU `vmap`
over per-client kernels makes grouped convolutions, which XLA runs at a tenth of the speed, so
`auto` is `map` there and `vmap` elsewhere.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.engine.backend import computed_once, on_cpu

PyTree = Any


def map_and_sum(
    function: Callable[..., tuple[PyTree, PyTree, PyTree]],
    clients: str,
    rows: PyTree,
    *stacked: PyTree,
) -> tuple[PyTree, PyTree, PyTree]:
    """Applies `function` to every client, sums a part of its results and updates the clients' rows.

    It holds only as many parts as clients run at once, and writes each new row over the old one.

    Args:
      function: a pure function of one client's row and its other trees that returns (part, row,
        result).
      clients: `auto`, `map` (one after another), `vmap` (all at once) or `vmap:n` (n at a time, or
        all where there are fewer).
      rows: a tree with leading axis K.
      *stacked: likewise, one for each other argument.

    Returns:
      The sum of the parts over all clients, the new rows, and the results stacked along a leading
      axis K.

    Raises:
      ValueError: as `group_size`.
    """
    num_clients = jax.tree.leaves((rows, stacked))[0].shape[0]
    size = group_size(clients, num_clients)
    function = jax.jit(function, inline=True)  # traced once, though used twice

    def at_once(rows: PyTree, group: tuple) -> tuple[PyTree, PyTree, PyTree]:
        parts, rows, results = jax.vmap(function)(rows, *group)
        return sum_over(lambda part: part, parts), rows, results

    if size == num_clients > 1:
        return at_once(rows, stacked)

    # A scan whose carry holds the sum and all rows, so that memory does not grow with the clients.
    def step(carry: tuple[PyTree, PyTree], inputs: tuple) -> tuple[tuple[PyTree, PyTree], PyTree]:
        (total, rows), (start, group) = carry, inputs
        count = jax.tree.leaves(group)[0].shape[0]
        # In place, which arrays that a scan stacks are not: XLA fills and copies them. It would
        # copy all rows too, if a client's were read in several places.
        old = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count), rows)
        old = computed_once(jax.lax.optimization_barrier(old))
        if size > 1:
            part, new, results = at_once(old, group)
        else:
            first = jax.tree.map(lambda x: x[0], (old, *group))
            part, *one = function(*first)
            new, results = jax.tree.map(lambda x: x[None], tuple(one))
        rows = jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), rows, new
        )
        return (jax.tree.map(jnp.add, total, part), rows), results

    whole = num_clients - num_clients % size
    groups = jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), stacked)
    like, *_ = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], (rows, *stacked)))
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), rows
    begins = jnp.arange(0, whole, size, dtype=jnp.int32)
    carry, results = jax.lax.scan(step, start, (begins, groups))
    results = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), results)
    if whole < num_clients:
        rest = jax.tree.map(lambda x: x[whole:], stacked)
        carry, last = step(carry, (jnp.int32(whole), rest))
        results = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), results, last)
    return *carry, results


@functools.partial(jax.jit, static_argnums=0, inline=True)
def sum_over(function: Callable[..., PyTree], *stacked: PyTree) -> PyTree:
    """sum_k function(row k of each tree), leaf by leaf, of trees [K, ...] or without leaves.

    On CPU one row is added after another: XLA's own sum over a leading axis takes ten to forty
    times as long, where a row is large.
    """
    if not jax.tree.leaves(stacked):
        return function(*stacked)
    if not on_cpu():
        return jax.tree.map(lambda x: x.sum(0), jax.vmap(function)(*stacked))

    def add(total: PyTree, rows: tuple) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, function(*rows)), None

    like = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], stacked))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    return jax.lax.scan(add, zeros, stacked)[0]


def check_strategy(clients: str, num_clients: int) -> None:
    """Raises ValueError for an unknown strategy, or more clients at once than a federation has."""
    count = _at_once(clients)
    if count is not None and count > num_clients:
        raise ValueError(
            f"clients={clients!r} asks for {count} clients at a time, but there are {num_clients}: "
            f"use 'vmap:{num_clients}' or less"
        )


def group_size(clients: str, num_clients: int) -> int:
    """Returns how many of a device's clients the strategy trains at once, from 1 to all of them.

    Raises:
      ValueError: an unknown strategy.
    """
    return min(_at_once(clients) or num_clients, num_clients)


def _at_once(clients: str) -> int | None:
    """Returns how many clients the strategy trains at once; None for all."""
    if clients == "auto":
        clients = "map" if on_cpu() else "vmap"
    if clients in ("map", "vmap"):
        return 1 if clients == "map" else None
    kind, _, count = clients.partition(":")
    if kind != "vmap" or not count.isdecimal() or int(count) < 1:
        raise ValueError(
            f"clients={clients!r} is not a way to map clients: use 'auto', 'map', 'vmap' or "
            "'vmap:n' with n >= 1 clients at a time"
        )
    return int(count)
