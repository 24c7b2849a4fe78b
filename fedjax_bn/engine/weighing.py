"""What a weighing rule is that remembers, or to which clients tell something of their own."""

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
        clients of the round and messages their stacked `LocalUpdate.message`, or what `tell` gave;
        who does not count has size and risk 0, and messages that mean nothing.
      tell: `tell(received, variables) -> tree of arrays`, what a client uploads for the rule alone
        at the end of a round, beside the message of its method: of its `state.Received` and of
        the variables that it has trained. None: nothing.
      by_leaf: `by_leaf(stacked, weights f[C]) -> tree of f[C]`, weights of each shared leaf
        [C, ...] on its own, nonnegative and of the sum of `weights`, from the uploaded leaves;
        those of who has weight 0 mean nothing. On a mesh every device then holds all uploads.
        None: one weight a client for all leaves.
    """

    init: Callable[[int], PyTree]
    weigh: Callable[[PyTree, jax.Array, jax.Array, PyTree], tuple[jax.Array, PyTree]]
    tell: Callable[[Any, Variables], PyTree] | None = None
    by_leaf: Callable[[PyTree, jax.Array], PyTree] | None = None
