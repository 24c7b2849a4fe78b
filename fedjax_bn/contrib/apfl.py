"""APFL (Deng, Kamani & Mahdavi, 2020): a learned mixture of a local and the global model."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, UpTo1, bounded
from fedjax_bn.client import Trained, run_steps
from fedjax_bn.contrib.parts import of_shared, with_model, with_own_model
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.optimizers import descend
from fedjax_bn.engine.optimizers import start as start_optimizer
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Gradient, LocalStep, differentiate, gradient_step, in_turn
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.sharing import OWN, PyTree, Variables, join, without
from fedjax_bn.state import Received

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

    w trains as in FedAvg and is what an unseen client receives. v and alpha stay with the client,
    which predicts with the mixture at the end of its last round; its running statistics are those
    of its passes. With alpha 0 and rate 0 it is FedAvg, with alpha 1 SingleSet's model beside it.
    The reported loss is that of w. A step costs a second pass.

    Differs from the authors' code (MLOPTPSU/FedTorch): it mixes the outputs of v and w, not their
    parameters, and alpha moves after both models' first steps, by a gradient with a decay.

    Args:
      alpha: every client's first share of v, in [0, 1].
      alpha_rate: r, the learning rate of alpha, at least 0; 0 keeps alpha.
    """
    learned, federate_options = learning(model, **options)
    gradient = differentiate(supervised(learned))
    shared_step = of_shared(gradient_step(gradient, optimizer))
    train = federate_options.pop("train", None) or run_steps

    # Around the training and not the step, because only a round's start knows the received model.
    def train_mixture(
        step: LocalStep, received: Received, variables: Variables, state: PyTree, batches: Batch,
        *arguments: Any,
    ) -> Trained:  # fmt: skip
        personal = variables[OWN]
        variables = _mixed(variables, personal["model"], personal["alpha"], personal["local"])
        # The first step is marked.
        batches = batches | {_FIRST: jnp.arange(batches["valid"].shape[0]) == 0}
        return train(step, received, variables, state, batches, *arguments)

    def start(key: jax.Array, variables: Variables) -> Variables:
        share = jnp.asarray(alpha, parameter_dtype(variables))
        # v starts as the shared model, so the mixture does too.
        return with_own_model(variables, alpha=share, local={"params": variables["params"]})

    step = in_turn(shared_step, _personal_step(gradient, optimizer, alpha_rate))
    return method_of(step, keeps=OWN, train=train_mixture, start=start, **federate_options)


def _mixed(variables: Variables, model: Variables, alpha: jax.Array, local: PyTree) -> Variables:
    """Returns the variables with a new alpha and v, and the own model's parameters mixed."""

    # Each share has its leaf's dtype, so that half precision stays.
    def mix(v: jax.Array, w: jax.Array) -> jax.Array:
        return alpha.astype(v.dtype) * v + (1 - alpha).astype(w.dtype) * w

    params = jax.tree.map(mix, local["params"], variables["params"])
    return with_model(variables, {**model, "params": params}, alpha=alpha, local=local)


def _personal_step(
    gradient: Gradient, optimizer: optax.GradientTransformation, alpha_rate: float
) -> LocalStep:
    """Returns the step that trains v and alpha, after that of w on the same batch."""

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        personal, alpha = variables[OWN], variables[OWN]["alpha"]
        # The gradient is taken at the mixture, whose collections replace the shared model's.
        mixture = {**without(variables, OWN), **personal["model"]}
        gradients, (loss, moved) = gradient(mixture, batch, received, key)
        # alpha moves in the first step alone, before which w is the received model.
        w = join(received.shared, received.personal)["params"]

        # dF(mixture)/dalpha, leaf by leaf.
        def slope(g: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.vdot(g, v - w).astype(alpha.dtype)

        slopes = jax.tree.map(slope, gradients["params"], personal["local"]["params"], w)
        new_alpha = jnp.clip(alpha - alpha_rate * sum(jax.tree.leaves(slopes)), 0, 1)
        new_alpha = jnp.where(batch[_FIRST], new_alpha, alpha)
        # dF(mixture)/dv is alpha times dF/d(mixture).
        scaled = jax.tree.map(lambda g: alpha.astype(g.dtype) * g, gradients)
        local, state = descend(optimizer, scaled, state, personal["local"], received.round, loss)
        return _mixed(variables, {**personal["model"], **moved}, new_alpha, local), state, loss

    return LocalStep(lambda variables: start_optimizer(optimizer, variables[OWN]["local"]), update)
