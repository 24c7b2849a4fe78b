"""FedSAM and FedASAM (Qu et al., ICML 2022; Caldarola et al., ECCV 2022): flat minima at clients.

With SCAFFOLD's variates it is FedGAMMA (Dai et al., TNNLS 2023).
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.engine.dtypes import parameter_dtype, promote
from fedjax_bn.engine.optimizers import check_fresh
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Gradient, Grads, differentiate, gradient_step
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.methods.scaffold import corrected, keeping_variates
from fedjax_bn.sharing import PyTree, Variables
from fedjax_bn.state import Received


@bounded
def fedsam(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    rho: AtLeast0 = 0.05,
    eta: AtLeast0 = 0.0,
    variates: bool = False,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Every local step follows the gradient at the worst point near w, on the same batch.

    $\nabla F(w + e)$ with $e = \rho T^2 g / \Vert T g \Vert$ and $g = \nabla F(w)$

    The norm is over all parameters together. SAM (Foret et al. 2021) has T = 1. Adaptive SAM (Kwon
    et al. 2021), with eta above 0, has T = |w| + eta for kernels (leaves with at least two axes)
    and T = 1 for all other leaves. With `variates`, SCAFFOLD's variates correct the gradient at
    w + e (FedGAMMA), and what SCAFFOLD sends travels with the model. The reported loss is F(w).
    With rho = 0 it is FedAvg, or SCAFFOLD. A step costs two passes.

    Differs from Caldarola's code: running statistics move in the first pass only, once a step.

    Args:
      optimizer: the local optimizer, which applies the gradient at w + e.
      rho: distance of the point from w, at least 0; 0.05 as in HarmoFL's code. Caldarola et al.
        have 0.1 for SAM and 0.7 for ASAM on CIFAR-10, to our knowledge.
      eta: eta of ASAM, at least 0; 0 is SAM. 0.2 in Caldarola et al., to our knowledge.
      variates: whether clients keep SCAFFOLD's variates; a momentum that they keep as well raises
        ValueError.
      model, **options: as in `fedavg`; with `variates` without `server`.
    """
    learned, federate_options = learning(model, **options)
    gradient = sharpness_aware(differentiate(supervised(learned)), rho, eta)
    if variates:
        check_fresh("fedsam with variates", optimizer, federate_options)
        gradient = corrected(gradient)
        federate_options |= keeping_variates(optimizer)
    return method_of(gradient_step(gradient, optimizer), **federate_options)


def sharpness_aware(gradient: Gradient, rho: float, eta: float = 0.0) -> Gradient:
    """Returns the gradient at w + e, and the report of the pass at w; see `fedsam`.

    Both passes use the same key, and thus the same dropout and perturbation.
    """

    def wrapped(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Grads:
        gradients, reported = gradient(variables, batch, received, key)
        worst = _worst_point(variables["params"], gradients["params"], rho, eta)
        # Its report is dropped, so that running statistics move once a step.
        at_worst, _ = gradient({**variables, "params": worst}, batch, received, key)
        return at_worst, reported

    return wrapped


def _worst_point(params: PyTree, gradients: PyTree, rho: float, eta: float) -> PyTree:
    """Returns w + rho T^2 g / ||T g||, see `fedsam`; w where the gradient is 0."""

    def scale(w: jax.Array) -> jax.Array:
        return jnp.abs(w) + eta if eta > 0 and w.ndim > 1 else jnp.ones((), w.dtype)

    scaled = jax.tree.map(lambda w, g: scale(w) * g, params, gradients)
    # Squares of half-precision numbers would overflow.
    wide = promote(parameter_dtype({"params": params}), jnp.float32)
    squares = (jnp.square(leaf.astype(wide)).sum() for leaf in jax.tree.leaves(scaled))
    norm = jnp.sqrt(sum(squares, jnp.zeros((), wide)))
    length = jnp.where(norm > 0, rho / jnp.where(norm > 0, norm, 1), 0)
    return jax.tree.map(
        lambda w, g: w + (scale(w) * g * length.astype(w.dtype)).astype(w.dtype), params, scaled
    )
