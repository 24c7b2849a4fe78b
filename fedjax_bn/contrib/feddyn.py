"""FedDyn (Acar et al., ICLR 2021): a dynamic regularizer that aligns clients' minima."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn import aggregation
from fedjax_bn.aggregation import Aggregate, ServerState, ServerUpdate, Weighing, WeighingRule
from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.client import Trained
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import differentiate, gradient_step
from fedjax_bn.methods.learning import OptionsButServer, learning, method_of, supervised
from fedjax_bn.methods.scaffold import no_changes, over_shared
from fedjax_bn.sharing import PyTree, Variables, split_like
from fedjax_bn.state import Received


@bounded
def feddyn(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    alpha: AtLeast0 = 0.01,
    weigh: WeighingRule | Weighing | None = aggregation.uniform,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""Clients minimize a regularized loss whose minima agree with those of the mean loss.

    $F_k(w) - \langle g_k, w \rangle + \frac{\alpha}{2} \Vert w - x \Vert^2$ (Algorithm 1)

    $g_k' = g_k - \alpha (y_k - x)$ and $h' = h - \alpha \frac{1}{K} \sum_k (y_k - x)$

    $x' = \mathrm{mean}_k \, y_k - h' / \alpha$

    Sum and mean are over the round's participants, K are all clients; g_k and h start at 0, and
    concern shared parameters. Running statistics are averaged. The reported loss is F_k. With alpha
    0 it is FedAvg, which is not the limit of a small alpha: there h / alpha remains. The authors'
    code (alpemreacar/FedDyn) also divides alpha by K p_k and clips gradients to norm 10; with
    clients of equal size and smaller gradients both agree.

    Args:
      alpha: strength of the regularizer, at least 0; 0.01 in the authors' code for CIFAR-10.
      weigh: the weights of the participants in both means; equal ones in the paper.
    """
    learned, federate_options = learning(model, **options)
    gradient = differentiate(supervised(learned))

    # The client's memory is d_k = -g_k / alpha.
    def regularized(received: Received, gradients: PyTree, params: PyTree) -> PyTree:
        trees = gradients, params, received.shared["params"], received.memory
        return jax.tree.map(lambda g, w, x, d: g + alpha * (w - x + d), *trees)

    if alpha:
        gradient = over_shared(gradient, regularized)
        server = ServerUpdate(lambda *start: ServerState(kept=no_changes(*start)), _add_changes)
        federate_options |= {"memory": no_changes, "finish": _add_change, "server": server}
    return method_of(gradient_step(gradient, optimizer), weigh=weigh, **federate_options)


def _add_change(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """Returns the last act: d_k' = d_k + y_k - x."""
    start = received.shared["params"]
    end, _ = split_like(trained.variables["params"], start)
    changes = jax.tree.map(lambda d, y, x: d + (y - x), received.memory, end, start)
    return trained.variables, changes, ()


def _add_changes(
    shared: PyTree, aggregate: Aggregate, state: ServerState
) -> tuple[PyTree, ServerState]:
    """Returns x' = mean + d with d = -h / alpha, the mean of all clients' d_k."""
    mean, share = aggregate.mean["params"], aggregate.share
    trees = state.kept, mean, shared["params"]
    changes = jax.tree.map(lambda d, y, x: d + (y - x) * share.astype(d.dtype), *trees)
    params = jax.tree.map(jnp.add, mean, changes)
    return {**aggregate.mean, "params": params}, ServerState(kept=changes)
