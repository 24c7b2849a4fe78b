"""What every method obeys, of those that other papers compare with: one program for all claims."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from federations import (
    ON_MAPS,
    RIVALS,
    MapNet,
    PlainNet,
    as_maps,
    assert_close,
    assert_equal,
    batches_of,
    client,
    client_variables,
    global_variables,
    in_float64,
    run_rounds,
    variables_of,
)
from fedjax_bn.aggregation import by_size
from fedjax_bn.engine.perturb import amplitude_mix
from fedjax_bn.engine.perturb import randconv as random_convolutions
from method_table import METHODS

KEY = jax.random.key(1)
SIZES = (9, 4, 6)
KINDS = {name: {} for name in RIVALS} | {
    "fedsam, variates": {"variates": True},
    "fedsam, adaptive": {"eta": 0.2},
    "fedsr, l2r alone": {"noise": False, "cmi": 0.0},
    "csac": {"weigh": by_size},
    "fedwon": {"clip": 0.1},
    "fedavg, amplitudes mixed": {"prepare": as_maps, "perturb": amplitude_mix(0.5)},
    "fedavg, random convolutions": {"prepare": as_maps, "perturb": random_convolutions()},
}
NETS = {"fedwon": PlainNet()}  # the others have batch norm
# What looks at who is valid in a batch, or keeps something of its own.
OFTEN = [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("csd", "mixstyle")))
    for kind in KINDS
]


@functools.cache
def method_of(kind):
    name = kind.partition(",")[0]
    options = ON_MAPS.get(name, {}) | KINDS[kind]
    optimizer = optax.sgd(0.1, momentum=0.5)
    return METHODS[name](net_of(kind), optimizer, clients="map", **options)


def net_of(kind):
    return NETS.get(kind, MapNet())


def started(kind):
    init = jax.jit(method_of(kind).init, static_argnums=2)  # not a program for each leaf
    return init(KEY, in_float64(variables_of(net_of(kind))), 3)


def rounds_of(kind, change=(), who=(0, 1, 2), present=(True, True, True)):
    """Two rounds, the second with some clients only; always the same compiled program."""
    batches = batches_of(SIZES) | dict(change)
    batches |= {"client": jnp.asarray(who, jnp.int32), "population": jnp.asarray(3, jnp.int32)}
    state, states = started(kind), []
    for participates in ((True, True, True), present):
        some = batches | {"participates": jnp.asarray(participates)}
        state, metrics = method_of(kind).round(state, some, KEY)
        states.append(jax.device_get(state))
    return states, metrics


@pytest.mark.slow
@pytest.mark.parametrize("kind", OFTEN)
def test_identical_clients_aggregate_to_themselves(x64, kind):
    same = jax.tree.map(lambda x: jnp.repeat(x[:1], 3, 0), batches_of(SIZES))
    (together, later), _ = rounds_of(kind, same, who=(1, 1, 1))
    for tree in (client_variables(later), later.memory):
        assert_close(client(tree, 2), client(tree, 0), rtol=1e-9, atol=1e-12)
    (alone, _), _ = rounds_of(kind, same, who=(1, 1, 1), present=(False, True, False))
    assert_close(global_variables(together), global_variables(alone), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", OFTEN)
def test_permuting_clients_permutes_results(x64, kind):
    order = np.array([2, 0, 1])
    (_, state), _ = rounds_of(kind)
    moved = jax.tree.map(lambda x: x[order], batches_of(SIZES))
    (_, other), _ = rounds_of(kind, moved, who=order)
    ours, theirs = ((s.personal, s.memory, s.weights) for s in (other, state))
    assert_close(other.shared, state.shared, rtol=1e-9, atol=1e-12)
    assert_close(ours, jax.tree.map(lambda x: x[order], theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", OFTEN)
def test_a_client_that_sits_out_keeps_what_is_its_own_and_nothing_of_it_is_seen(x64, kind):
    (before, after), metrics = rounds_of(kind, present=(True, False, True))
    kept, now = ((s.personal, s.memory) for s in (before, after))
    assert_equal(client(now, 1), client(kept, 1))
    np.testing.assert_allclose(metrics["weights"], [0.6, 0, 0.4], rtol=1e-9)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((after, metrics["weights"])))


@pytest.mark.parametrize("kind", OFTEN)
def test_for_the_server_a_client_without_samples_is_absent(x64, kind):
    none = {"valid": batches_of(SIZES)["valid"].at[1].set(False)}
    batches = batches_of(SIZES)
    ids = {"client": jnp.arange(3, dtype=jnp.int32), "population": jnp.asarray(3, jnp.int32)}
    found = []
    for change, there in (({}, (True, False, True)), (none, (True, True, True))):
        given = batches | ids | change | {"participates": jnp.asarray(there)}
        state, metrics = method_of(kind).round(started(kind), given, KEY)
        found.append((state.shared, state.server, state.weighing, metrics["weights"]))
    assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", OFTEN)
def test_padding_is_invisible(x64, kind):
    """It holds NaN in `batches_of`, and other values here."""
    batches = batches_of(SIZES)
    valid = batches["valid"]
    filled = {
        "image": jnp.where(valid[..., None], batches["image"], 7.0),
        "label": jnp.where(valid, batches["label"], 1),
    }
    assert_equal(rounds_of(kind, filled), rounds_of(kind))


@pytest.mark.slow
@pytest.mark.parametrize("name", RIVALS)
def test_every_client_strategy_gives_the_same_numbers(x64, name):
    variables = in_float64(variables_of(MapNet()))
    states = [
        run_rounds(
            METHODS[name](MapNet(), optax.sgd(0.1), clients=c, **ON_MAPS.get(name, {})),
            variables,
            batches_of(SIZES),
            rounds=2,
        )[0]
        for c in ("map", "vmap:2")
    ]
    assert_close(*states, rtol=1e-9, atol=1e-12)
