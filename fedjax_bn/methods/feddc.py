"""FedDC (Gao et al., CVPR 2022): local drift, decoupled and corrected."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.client import Trained, run_steps
from fedjax_bn.engine.optimizers import check_fresh
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import LocalStep, differentiate, gradient_step
from fedjax_bn.methods.learning import OptionsButServer, learning, method_of, supervised
from fedjax_bn.methods.scaffold import keeping_variates, over_shared
from fedjax_bn.sharing import PyTree, Variables, join, split_like
from fedjax_bn.state import Received


class _Drift(NamedTuple):
    """A client's memory: trees like the shared parameters."""

    drift: PyTree  # h_k, the sum of its changes y_k - x so far
    variate: PyTree  # c_k, its estimate of its gradient


@bounded
def feddc(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    alpha: AtLeast0 = 0.1,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""Clients minimize their loss with a penalty on their drift, and upload the drift.

    $F_k(w) + \frac{\alpha}{2} \Vert w + h_k - x \Vert^2 + \langle w, c - c_k \rangle$

    $h_k' = h_k + y_k - x$ and $x' = \sum_k p_k (y_k + h_k')$

    $c_k' = c_k - c + (x - y_k) / (\tau_k lr)$ and $c' = c + \frac{1}{K} \sum_k (c_k' - c_k)$

    The equations apply to shared parameters only; the server averages running statistics. The
    variates are SCAFFOLD's, see `scaffold`. The reported loss is F_k alone.

    The sum is over the round's participants, with the round's weights. Differs from the authors'
    code (gaoliang13/FedDC): there x' is the plain mean of the participants' y_k plus that of all
    clients' h_k, and alpha and c are divided by K p_k. Both agree if all take part with equal size.

    Args:
      optimizer: the local optimizer, which should be linear in its gradients, such as SGD; one
        whose momentum clients keep raises ValueError.
      alpha: strength of the penalty, at least 0. To our knowledge the paper has 0.1 for CIFAR-10;
        the authors' example has 0.01.
    """
    check_fresh("feddc", optimizer, options)
    learned, federate_options = learning(model, **options)
    train = federate_options.pop("train", None) or run_steps
    variates = keeping_variates(optimizer)
    zeros, renew_variate = variates["memory"], variates["finish"]

    # Its steps read alpha (h_k - x) + c - c_k as `received.memory`, the same in all steps of a
    # round, so that a step reads one tree instead of four.
    def pulled(step: LocalStep, received: Received, *arguments: Any) -> Trained:
        memory, start = received.memory, received.shared["params"]
        trees = memory.drift, start, received.server, memory.variate
        pull = jax.tree.map(lambda h, x, c, c_k: alpha * (h - x) + (c - c_k), *trees)
        return train(step, received._replace(memory=pull), *arguments)

    # g + alpha (w + h_k - x) - c_k + c
    def penalized(received: Received, gradients: PyTree, params: PyTree) -> PyTree:
        # The pull contains h_k - x and c - c_k already; only w changes from step to step.
        trees = gradients, params, received.memory
        return jax.tree.map(lambda g, w, p: g + (alpha * w + p), *trees)

    # Keeps h_k' and c_k', uploads y_k + h_k' and sends c_k' - c_k.
    def finish(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
        before, start = received.memory, received.shared["params"]
        received = received._replace(memory=before.variate)
        variables, variate, message = renew_variate(received, trained)
        end, personal = split_like(variables["params"], start)
        # The upload contains the new drift, because the server averages y_k + h_k'.
        drift = jax.tree.map(lambda h, y, x: h + y - x, before.drift, end, start)
        params = join(jax.tree.map(jnp.add, end, drift), personal)
        return {**variables, "params": params}, _Drift(drift, variate), message

    gradient = over_shared(differentiate(supervised(learned)), penalized)
    return method_of(
        gradient_step(gradient, optimizer),
        server=variates["server"],
        memory=lambda *start: _Drift(zeros(*start), zeros(*start)),
        train=pulled,
        finish=finish,
        **federate_options,
    )
