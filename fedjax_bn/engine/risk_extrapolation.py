r"""Risk extrapolation aggregation, REA of FedCD (Ma et al., ACM MM 2024, Section 3.4).

A client's risk R_e is its mean training loss over its last local epoch. REA makes the weighted
risks of all clients equal:

$w = \mathrm{argmin} \; \mathrm{Var}(w_1 R_1, \ldots, w_K R_K)$ with $\sum_e w_e = 1$ (Eq. 17)

$c_e = \exp(\eta w_e + p_e) / \sum_k \exp(\eta w_k + p_k)$ (Eq. 18)

All w_e are positive; p_e is the client's share of all samples and c_e its aggregation weight.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.arguments.ranges import AtLeast0, bounded


@bounded
def risk_extrapolation(
    eta: AtLeast0 = 0.5, solver: Literal["closed_form", "slsqp"] = "closed_form"
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the weighing rule c_e = softmax(eta w_e + p_e) with w of Eq. 17.

    Only clients with samples count. One whose risk is not finite, or below the least normal number
    (1.2e-38 in float32), gets NaN: the round changes nothing, and a run stops by `check_risks`.

    Args:
      eta: contribution of the risks, at least 0; the paper takes 0.3, 0.5 and 0.8.
      solver: "closed_form" (see `equal_risks`), or "slsqp" of SciPy on the host, which gives the
        same weights to about 1e-6.
    """
    solve = equal_risks if solver == "closed_form" else _least_variance

    def rule(sizes: jax.Array, risks: jax.Array) -> jax.Array:
        sizes, risks = jnp.asarray(sizes), jnp.asarray(risks)
        dtype = jnp.result_type(float)
        counts, risks = sizes > 0, risks.astype(dtype)
        # XLA takes smaller numbers as 0, which would make every weight NaN.
        unusable = counts & ~((risks >= jnp.finfo(dtype).tiny) & (risks < jnp.inf))
        # A wrong risk becomes 1, so that the other clients' weights stay finite.
        w = solve(jnp.where(counts & ~unusable, risks, 1), counts)
        shares = sizes.astype(dtype) / jnp.maximum(sizes.sum(), 1).astype(dtype)
        weights = jax.nn.softmax(eta * w + shares, where=counts)
        return jnp.where(unusable, jnp.nan, jnp.where(counts, weights, 0))

    return rule


def check_risks(sizes: np.ndarray, risks: np.ndarray, names: list[str]) -> None:
    """Raises ValueError if a client with samples i32[K] has a risk f[K] that no rule can weigh."""
    floor = jnp.finfo(jnp.result_type(float)).tiny
    unusable = (sizes > 0) & ~((risks >= floor) & np.isfinite(risks))
    if unusable.any():
        k = int(unusable.argmax())
        raise ValueError(f"risk {risks[k]:g} of {names[k]} must be finite, above 0: use by_size")


def equal_risks(risks: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the solution of Eq. 17 of risks f[K]: w_e proportional to 1 / R_e, without variance.

    Clients outside of `counts` bool[K] get weight 0; the risks of the others are positive.
    """
    # Relative to the floor risk, because 1 / R of a tiny risk would overflow.
    floor = jnp.min(risks, initial=jnp.inf, where=counts)
    # R_min / R_e is in (0, 1] whatever the scale of the risks.
    inverse = jnp.where(counts, floor / risks, 0)
    return inverse / jnp.maximum(inverse.sum(), 1)


def _least_variance(risks: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns what `equal_risks` does, by sequential least squares (SLSQP), also under `jit`.

    The unknowns are v_e = w_e R_e, scaled to 1 at the solution, because with the unknowns w_e SciPy
    stops at weights that are wrong by up to 0.6, and with the default ftol at the start.
    """
    from scipy.optimize import minimize

    # SciPy runs on the host, so XLA must know the shape and dtype of the result. Under x64 of one
    # thread the callback's thread gets float32.
    form = jax.ShapeDtypeStruct(risks.shape, risks.dtype)

    def solve(risks: np.ndarray, counts: np.ndarray) -> np.ndarray:
        risks, counts = np.asarray(risks), np.asarray(counts)
        w = np.zeros(form.shape, form.dtype)
        if not counts.any():
            return w
        present = risks[counts].astype(np.float64)
        inverse = present.min() / present
        share = inverse / inverse.sum()  # w_e = share_e v_e
        solution = minimize(
            np.var,
            1 / (len(share) * share),  # equal weights w_e
            jac=lambda v: 2 * (v - v.mean()) / len(v),
            bounds=[(0, None)] * len(share),
            constraints={"type": "eq", "fun": lambda v: share @ v - 1, "jac": lambda v: share},
            method="SLSQP",
            options={"ftol": 1e-12, "maxiter": 1000},
        )
        unscaled = share * solution.x
        w[counts] = unscaled / unscaled.sum()
        return w

    return jax.pure_callback(solve, form, risks, counts, vmap_method="sequential")
