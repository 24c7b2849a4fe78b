"""Rounds against independent PyTorch runs on a small network, in float64."""

import jax
import numpy as np
import optax
import pytest
from small_oracle import SmallNet, batches_from, load, variables_from

from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.methods import fedavg, fedbn

METHODS = {"all": fedavg, "bn_local": fedbn}


@pytest.mark.parametrize("clients", ["map", "vmap", "vmap:2"])
@pytest.mark.parametrize("mode", METHODS)
def test_three_rounds_of_fedavg_equal_pytorch(shared, x64, mode, clients):
    values = load(shared)
    method = METHODS[mode](SmallNet(), optax.sgd(0.1), clients=clients)
    key = jax.random.key(0)
    state = method.init(key, variables_from(values, "init"), 3)
    for round in range(3):
        state, metrics = method.round(state, batches_from(values), key)
        np.testing.assert_allclose(
            metrics["loss"], values[f"fedavg__{mode}__losses"][round], rtol=1e-9
        )
    np.testing.assert_allclose(metrics["weights"], np.array([40, 21, 56]) / 117, rtol=1e-12)
    assert_trees_close(global_variables(state), variables_from(values, f"fedavg__{mode}__server"))
    models = client_variables(state)
    for k in range(3):
        own = jax.tree.map(lambda leaf, k=k: leaf[k], models)
        assert_trees_close(own, variables_from(values, f"fedavg__{mode}__client{k}"))


def assert_trees_close(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), ours, theirs)
