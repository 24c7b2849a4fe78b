"""What every method of `methods` and `contrib` holds: one program a method for all claims."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn import contrib
from fedjax_bn.aggregation import by_size
from fedjax_bn.engine.perturb import amplitude_mix
from fedjax_bn.engine.perturb import randconv as random_convolutions
from fedjax_bn.federation import broadcast_of, own_of
from method_table import METHODS

KEY = jax.random.key(1)
SIZES = (9, 4, 6)
OWN = ("fedavg", "fedprox", "fedbn", "fedadam", "feddc", "fednova", "moon", "perfedavg", "scaffold")
KINDS = {name: {} for name in (*OWN, "fediga", *contrib.__all__)} | {
    **{name: {"weigh": by_size} for name in ("fedawa", "fedcd", "feddyn")},
    "fedsam, variates": {"variates": True},
    "fedsam, adaptive": {"eta": 0.2},
    "fedsr, l2r alone": {"noise": False, "cmi": 0.0},
    "csac": {"weigh": by_size},
    "fedwon": {"clip": 0.1},
    "fedavg, amplitudes mixed": {"prepare": fed.as_maps, "perturb": amplitude_mix(0.5)},
    "fedavg, random convolutions": {"prepare": fed.as_maps, "perturb": random_convolutions()},
}
NETS = {"fedwon": fed.PlainNet()}  # the others have batch norm
# What looks at who is valid in a batch, or keeps something of its own.
TELLING = ("mixstyle", "scaffold")
OFTEN = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in TELLING)) for kind in KINDS]


@functools.cache
def method_of(kind):
    name = kind.partition(",")[0]
    options = fed.ON_MAPS.get(name, {}) | KINDS[kind]
    optimizer = optax.sgd(0.1, momentum=0.5)
    return METHODS[name](net_of(kind), optimizer, clients="map", **options)


def net_of(kind):
    return NETS.get(kind, fed.MapNet())


def started(kind):
    init = jax.jit(method_of(kind).init, static_argnums=2)  # not a program for each leaf
    return init(KEY, fed.in_float64(fed.variables_of(net_of(kind))), 3)


def rounds_of(kind, change=(), who=(0, 1, 2), present=(True, True, True)):
    """Two rounds, the second with some clients only; always the same compiled program."""
    batches = fed.batches_of(SIZES) | dict(change)
    batches |= {"client": jnp.asarray(who, jnp.int32), "population": jnp.asarray(3, jnp.int32)}
    state, states = started(kind), []
    for participates in ((True, True, True), present):
        some = batches | {"participates": jnp.asarray(participates)}
        state, metrics = method_of(kind).round(state, some, KEY)
        states.append(jax.device_get(state))
    return states, metrics


@pytest.mark.parametrize("kind", OFTEN)
def test_permuting_clients_permutes_results(x64, kind):
    order = np.array([2, 0, 1])
    (_, state), _ = rounds_of(kind)
    moved = jax.tree.map(lambda x: x[order], fed.batches_of(SIZES))
    (_, other), _ = rounds_of(kind, moved, who=order)
    ours, theirs = ((s.personal, s.memory, s.weights) for s in (other, state))
    fed.assert_close(other.shared, state.shared, rtol=1e-9, atol=1e-12)
    fed.assert_close(ours, jax.tree.map(lambda x: x[order], theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", OFTEN)
def test_a_client_that_sits_out_or_is_not_finite_keeps_what_is_its_own_and_is_not_seen(x64, kind):
    (before, after), metrics = rounds_of(kind, present=(True, False, True))
    kept, now = ((s.personal, s.memory) for s in (before, after))
    fed.assert_equal(fed.client(now, 1), fed.client(kept, 1))
    np.testing.assert_allclose(metrics["weights"], [0.6, 0, 0.4], rtol=1e-9)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((after, metrics["weights"])))
    image = fed.batches_of(SIZES)["image"].at[1, 0, 0].set(jnp.inf)
    (_, poisoned), metrics = rounds_of(kind, {"image": image})
    np.testing.assert_array_equal(metrics["finite"], [True, False, True])
    start = jax.device_get(started(kind))
    fed.assert_equal(
        fed.client((poisoned.personal, poisoned.memory), 1),
        fed.client((start.personal, start.memory), 1),
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(poisoned))


@pytest.mark.parametrize("kind", OFTEN)
def test_for_the_server_a_client_without_samples_is_absent(x64, kind):
    none = {"valid": fed.batches_of(SIZES)["valid"].at[1].set(False)}
    batches = fed.batches_of(SIZES)
    ids = {"client": jnp.arange(3, dtype=jnp.int32), "population": jnp.asarray(3, jnp.int32)}
    found = []
    for change, there in (({}, (True, False, True)), (none, (True, True, True))):
        given = batches | ids | change | {"participates": jnp.asarray(there)}
        state, metrics = method_of(kind).round(started(kind), given, KEY)
        found.append((state.shared, state.server, state.weighing, metrics["weights"]))
    fed.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", OFTEN)
def test_padding_is_invisible(x64, kind):
    """It holds NaN in `batches_of`, and other values here."""
    batches = fed.batches_of(SIZES)
    valid = batches["valid"]
    filled = {
        "image": jnp.where(valid[..., None], batches["image"], 7.0),
        "label": jnp.where(valid, batches["label"], 1),
    }
    fed.assert_equal(rounds_of(kind, filled), rounds_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_an_upload_has_the_shared_leaves_and_a_state_keeps_its_form(kind):
    """From shapes: nothing is compiled."""
    method, key = method_of(kind), jax.eval_shape(jax.random.key, 0)
    model = fed.variables_of(net_of(kind))
    state = jax.eval_shape(lambda: method.init(KEY, model, 3))
    batches = jax.tree.map(lambda leaf: leaf[0], fed.batches_of(SIZES))
    batches["client"] = jax.ShapeDtypeStruct((), jnp.int32)
    own = jax.eval_shape(lambda state: own_of(state, 0), state)
    received = jax.eval_shape(broadcast_of, state)
    kept, upload = jax.eval_shape(method.client, received, own, batches, key)
    assert jax.tree.map(form, upload.shared) == jax.tree.map(form, state.shared)
    assert jax.tree.map(form, kept) == jax.tree.map(form, own)
    after, _ = jax.eval_shape(method.round, state, fed.batches_of(SIZES), key)
    assert jax.tree.map(form, after) == jax.tree.map(form, state)


def form(leaf):
    return leaf.shape, leaf.dtype
