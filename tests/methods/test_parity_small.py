"""Rounds against independent PyTorch runs on a small network, in float64."""

import jax
import numpy as np
import optax
import pytest

from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.methods import fedadam, fedavg, fednova, scaffold
from fedjax_bn.sharing import all_but_batch_norm, everything
from small_oracle import SmallNet, batches_from, load, variables_from

METHODS = {m.__name__: m for m in (fedavg, scaffold, fednova, fedadam)}
SHARING = {"all": everything, "bn_local": all_but_batch_norm}


@pytest.mark.parametrize(
    ("name", "mode", "clients"),
    [
        ("fedavg", "all", "map"),
        ("scaffold", "bn_local", "vmap:2"),
        *((name, "bn_local", "map") for name in ("fednova", "fedadam")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("fedavg", "bn_local", "map"), ("fedavg", "all", "vmap")),
                *((name, "all", "map") for name in ("scaffold", "fednova", "fedadam")),
                ("scaffold", "bn_local", "map"),
            )
        ),
    ],
)
def test_three_rounds_equal_pytorch(shared, x64, name, mode, clients):
    values = load(shared)
    method = METHODS[name](SmallNet(), optax.sgd(0.1), share=SHARING[mode], clients=clients)
    key = jax.random.key(0)
    state = method.init(key, variables_from(values, "init"), 3)
    for round in range(3):
        state, metrics = method.round(state, batches_from(values), key)
        losses = values[f"{name}__{mode}__losses"][round]
        np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-9)
    np.testing.assert_allclose(metrics["weights"], np.array([40, 21, 56]) / 117, rtol=1e-12)
    assert_trees_close(global_variables(state), variables_from(values, f"{name}__{mode}__server"))
    models = jax.device_get(client_variables(state))
    for k in range(3):
        own = jax.tree.map(lambda leaf, k=k: leaf[k], models)
        assert_trees_close(own, variables_from(values, f"{name}__{mode}__client{k}"))


def assert_trees_close(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), ours, theirs)
