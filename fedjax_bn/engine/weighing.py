"""Weighing rules with a state, or with an upload of their own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_bn.sharing import Variables

PyTree = Any


class Weighing(NamedTuple):
    """A weighing rule that may look at the clients' messages and remember.

    Attributes:
      init: `init(num_clients) -> state`, a tree of arrays [K, ...], a row a client.
      weigh: `weigh(state, sizes, risks, messages) -> (weights f[C], state)`, where rows are the C
        clients of the round and messages their stacked `LocalUpdate.message`, or the results of
        `tell`. A client that does not count has size and risk 0, and its message is meaningless.
      tell: `tell(received, variables) -> tree of arrays`, what a client uploads for the rule alone
        at the end of a round, computed from its `state.Received` and its trained variables; None
        for nothing.
      by_leaf: `by_leaf(stacked, weights f[C]) -> tree of f[C]`, nonnegative weights for each
        uploaded leaf [C, ...], which sum to the sum of `weights`; the leaves of a client of weight
        0 are meaningless. On a mesh every device then holds all uploads. None for one weight a
        client for all leaves.
    """

    init: Callable[[int], PyTree]
    weigh: Callable[[PyTree, jax.Array, jax.Array, PyTree], tuple[jax.Array, PyTree]]
    tell: Callable[[Any, Variables], PyTree] | None = None
    by_leaf: Callable[[PyTree, jax.Array], PyTree] | None = None
