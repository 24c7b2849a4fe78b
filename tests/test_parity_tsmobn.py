"""TsmoBN on real digits against independent PyTorch runs, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_bn import adaptation
from fedjax_bn.aggregation import uniform
from fedjax_bn.federation import global_variables
from fedjax_bn.methods import fedavg, fedbn
from fedjax_bn.models import DigitCNN
from test_parity_digits import batches_of, close, initial_variables, pixels, stored

__all__ = ["stored"]  # a fixture


@pytest.mark.parametrize("make", [pytest.param(fedavg, marks=pytest.mark.slow), fedbn])
def test_the_unseen_stream_equals_pytorch(stored, x64, optimized, make):
    values, data = stored
    model, key = DigitCNN(), jax.random.key(0)
    method = make(model, optax.sgd(0.01), weigh=uniform)
    state, batches = method.init(key, initial_variables(), 5), batches_of(data)
    for _ in range(3):
        state, _ = method.round(state, batches, key)
    variables = global_variables(state)
    images = pixels(data["usps__test_images"][:160].astype(np.float64))
    stream = jnp.asarray(images).reshape(5, 32, *images.shape[1:])

    @jax.jit
    def logits(momentum):
        adapt = adaptation.tsmobn(model, momentum)
        step = lambda carry, batch: adapt.predict(variables, carry, batch)[::-1]  # noqa: E731
        return jax.lax.scan(step, adapt.init(variables), stream)[1].reshape(160, -1)

    name = make.__name__
    plain = jax.lax.map(lambda batch: model.apply(variables, batch), stream).reshape(160, -1)
    close(plain, values[f"{name}__server_usps"])
    for momentum in (0.9, 0.0):
        close(logits(momentum), values[f"{name}__tsmobn_usps__momentum{momentum}"])
