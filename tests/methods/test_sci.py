"""SCI: parity with PyTorch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import small_oracle
from fedjax_bn.methods.learning import learning
from fedjax_bn.methods.sci import Alignment, aligned_objective
from fedjax_bn.state import Received
from small_oracle import SmallNet

KEY = jax.random.key(5)


def test_sci_gives_the_reference_numbers(shared, x64):
    stored = small_oracle.load(shared)
    variables = small_oracle.variables_from(stored, "init")
    variables["mask"] = {"features": jnp.asarray(stored["sci__mask"])}
    batch = {
        "image": jnp.asarray(stored["sci__x"]),
        "label": jnp.asarray(stored["sci__y"], jnp.int32),
        "valid": jnp.ones(8, bool),
    }
    learned, _ = learning(SmallNet(), prepare=lambda images, dtype: images.astype(dtype))
    objective = aligned_objective(learned, float(stored["sci__lam"]))
    server = Alignment({"features": jnp.asarray(stored["sci__global_gradient"])}, jnp.int32(1))

    def both(trained):
        return objective({**variables, **trained}, batch, Received((), (), (), server), KEY)

    trained = {name: variables[name] for name in ("params", "mask")}
    step = jax.jit(jax.value_and_grad(both, has_aux=True))
    (total, (_, reported)), gradients = step(trained)
    close = partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-14)
    close(reported.loss, stored["sci__cross_entropy"])
    close(total, stored["sci__total"])
    close(reported.gradient["features"], stored["sci__mask_gradient"])
    close(gradients["mask"]["features"], stored["sci__grad__mask"])
    params = gradients["params"]
    for layer in ("fc1", "fc2"):
        close(params[layer]["kernel"].T, stored[f"sci__grad__{layer}.weight"])
        close(params[layer]["bias"], stored[f"sci__grad__{layer}.bias"])
    for ours, theirs in (("scale", "weight"), ("bias", "bias")):
        close(params["bn1"][ours], stored[f"sci__grad__bn1.{theirs}"])
