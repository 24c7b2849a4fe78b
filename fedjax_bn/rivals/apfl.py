"""APFL (Deng, Kamani & Mahdavi, 2020): a learned mixture of a local and the global model."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, UpTo1, bounded
from fedjax_bn.client import Train, Trained, run_steps
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.optimizers import descend
from fedjax_bn.engine.optimizers import start as start_optimizer
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Gradient, LocalStep, differentiate, gradient_step
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.rivals.own import with_own
from fedjax_bn.sharing import FROZEN, OWN, Variables, everything, keeping, without
from fedjax_bn.state import Received

PyTree = Any
_FIRST = "first_step"  # bool[S] in the batches: the step that also moves alpha


@bounded
def apfl(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    alpha: UpTo1 = 0.5,
    alpha_rate: AtLeast0 = 0.01,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""FedAvg, beside which each client learns how much of a local model v it mixes in.

    $\bar v = \alpha v + (1 - \alpha) w$ is the client's own model, with which it predicts

    $w' = w - \eta \nabla F_k(w)$ and $v' = v - \eta \alpha \nabla F_k(\bar v)$ in each step, and

    $\alpha' = \alpha - r \langle \nabla F_k(\bar v), v - w \rangle$, clipped to [0, 1], in the
    first step of a round (Eq. 10 of the paper), with the gradient of its first batch

    w trains as in FedAvg and is what an unseen client receives. v and alpha stay with the client;
    the running statistics of the own model are those of its passes. A client predicts with the
    mixture at the end of its last round. With alpha 0 and rate 0 it is FedAvg, with alpha 1
    SingleSet's model beside it. The reported loss is that of w. A step costs a second pass.

    Args:
      model: images -> outputs.
      optimizer: the local optimizer of both models.
      alpha: every client's first share of v, in [0, 1].
      alpha_rate: r, the learning rate of alpha, at least 0; 0 keeps alpha.
      **options: as in `fedavg`.
    """
    learned, rest = learning(model, **options)

    def start(key: jax.Array, variables: Variables) -> Variables:
        del key
        share = jnp.asarray(alpha, parameter_dtype(variables))
        return with_own(variables, alpha=share, local={"params": variables["params"]})

    rest["train"] = _marking_first(rest.get("train") or run_steps)
    return method_of(
        _mixing(differentiate(supervised(learned)), optimizer, alpha_rate),
        share=keeping(rest.pop("share", everything), OWN),
        start=start,
        **rest,
    )


def _marking_first(train: Train) -> Train:
    def marked(
        step: LocalStep, received: Received, variables: Variables, state: PyTree, batches: Batch,
        *rest: Any,
    ) -> Trained:  # fmt: skip
        first = jnp.arange(batches["valid"].shape[0]) == 0
        return train(step, received, variables, state, batches | {_FIRST: first}, *rest)

    return marked


def _mixture(alpha: jax.Array, local: PyTree, shared: PyTree) -> PyTree:
    return jax.tree.map(
        lambda v, w: alpha.astype(v.dtype) * v + (1 - alpha).astype(w.dtype) * w, local, shared
    )


def _mixing(
    gradient: Gradient, optimizer: optax.GradientTransformation, alpha_rate: float
) -> LocalStep:
    """Returns the step of `apfl`, which trains w, v and alpha."""
    shared = gradient_step(gradient, optimizer)

    def init(variables: Variables) -> PyTree:
        mine = start_optimizer(optimizer, variables[OWN]["local"])
        return shared.init(without(variables, OWN)), mine

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        own, before = variables[OWN], without(variables, OWN)
        alpha, local = own["alpha"], own["local"]["params"]
        mixed = {**before, **own["model"], "params": _mixture(alpha, local, before["params"])}
        gradients, (own_loss, moved) = gradient(mixed, batch, received, key)
        slopes = jax.tree.map(
            lambda g, v, w: jnp.vdot(g, v - w).astype(alpha.dtype),
            gradients["params"],
            local,
            before["params"],
        )
        new_alpha = jnp.clip(alpha - alpha_rate * sum(jax.tree.leaves(slopes)), 0, 1)
        scaled = jax.tree.map(lambda g: alpha.astype(g.dtype) * g, gradients)
        after, first, loss = shared.update(before, state[0], batch, received, key)
        trained, second = descend(
            optimizer, scaled, state[1], {"params": local}, received.round, own_loss
        )
        alpha, local = jnp.where(batch[_FIRST], new_alpha, alpha), trained["params"]
        mixed = {**mixed, **moved, "params": _mixture(alpha, local, after["params"])}
        mixed = without(mixed, FROZEN)
        kept = {**own, "model": mixed, "alpha": alpha, "local": trained}
        return {**after, OWN: kept}, (first, second), loss

    return LocalStep(
        init, update, lambda variables, *rest: shared.check(without(variables, OWN), *rest)
    )
