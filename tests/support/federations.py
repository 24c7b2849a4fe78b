"""Small federations that tests of the engine share."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_bn import federation
from fedjax_bn.aggregation import by_size
from fedjax_bn.normalization import BatchNorm

FEATURES, CLASSES = 6, 3
KEY = jax.random.key(1)
SGD = optax.sgd(0.1)  # one object, by which `once` finds a method that another file has compiled
NEED_MAPS = ("feddg", "fedfa", "fedrdn", "harmofl", "jigen", "l2d", "mixstyle", "randconv", "snr")
# What a user has to name: it says what a client shows of its data.
NAMED = {"feddg": {"spectra": 2}}


class NormNet(nn.Module):
    """Two blocks whose batch norms have names that say nothing, and a dense layer called bn."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(BatchNorm(name="a")(nn.Dense(8, name="bn")(x)))
        x = nn.relu(BatchNorm(name="b")(nn.Dense(8, name="norm")(x)))
        return nn.Dense(CLASSES, name="c")(x)


class OneNorm(nn.Module):
    """One batch norm between two dense layers: every further leaf has to be compiled."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(BatchNorm(name="a")(nn.Dense(8, name="bn")(x)))
        return nn.Dense(CLASSES, name="c")(x)


class PlainNet(nn.Module):
    """No batch norm."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES, name="dense")(x)


class DropoutNet(nn.Module):
    """Batch norm and dropout, told by `train`."""

    @nn.compact
    def __call__(self, x, train=False):
        x = BatchNorm()(nn.Dense(8)(x))
        return nn.Dense(CLASSES)(nn.Dropout(0.5)(x, deterministic=not train))


class MapNet(nn.Module):
    """A batch norm over maps, dropout, a classifier: every leaf has kernels to be compiled."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(BatchNorm(name="norm")(x.reshape(len(x), -1, 2))).mean(1)
        x = nn.Dropout(0.2)(x, deterministic=not train)
        return nn.Dense(CLASSES, name="out")(x)


def as_maps(images, dtype):
    """What `MapNet` reads, in the form of images of one channel."""
    return images.astype(dtype).reshape(-1, 3, 2, 1)


def as_squares(images, dtype):
    """The same three times side by side, 3x6."""
    return jnp.tile(images.astype(dtype).reshape(-1, 3, 2, 1), (1, 1, 3, 1))


# What a method needs on `MapNet`.
ON_MAPS = {
    "fedadg": {"hidden": 4, "projection": 3, "judging": 2},
    "feddg": {"prepare": as_maps, "channels": 1, **NAMED["feddg"]},
    "fedig": {"cafl": "sum"},  # the goldens are older than the default
    "fediga": {"cafl": "sum"},
    "fedrdn": {"prepare": as_maps, "channels": 1},
    "harmofl": {"prepare": as_maps, "channels": 1, "weigh": by_size},
    "jigen": {"prepare": as_squares},
    "l2d": {"prepare": as_maps, "channels": 1},
    "mixstyle": {"names": "norm"},
    "randconv": {"prepare": as_maps},
}


def variables_of(model, seed=0):
    """Distinct values everywhere, so that an exchange of leaves shows."""
    return jax.tree.map(lambda leaf: leaf, _variables_of(model, seed, jax.config.jax_enable_x64))


@functools.cache
def _variables_of(model, seed, x64):
    """One program for each model, not one an operation nor one a test."""
    sample = np.zeros((2, FEATURES), np.float32)
    leaves, structure = jax.tree.flatten(jax.jit(model.init)(jax.random.key(seed), sample))
    random = np.random.default_rng(seed)
    noise = [0.1 * random.uniform(size=leaf.shape) for leaf in leaves]
    leaves = [
        jnp.asarray(np.asarray(leaf) + n, leaf.dtype) for leaf, n in zip(leaves, noise, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


@functools.cache
def once(make, *arguments, **options):
    """The method `make(*arguments, **options)`, which all tests share, so that it compiles once."""
    return make(*arguments, **options)


def in_float64(variables):
    """The same values in float64, without a program for each shape."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), variables)


def batches_of(sizes, batch=4, epochs=1, seed=0, steps=None):
    """`epochs` epochs over clients of the given sizes; padding holds NaN, which must not matter."""
    random = np.random.default_rng(seed)
    steps = steps or -(-max(sizes) // batch)
    shape = (len(sizes), epochs, steps * batch)
    image = random.normal(size=(*shape, FEATURES)) + np.arange(len(sizes))[:, None, None, None]
    label = random.integers(0, CLASSES, shape)
    valid = np.broadcast_to(np.arange(steps * batch) < np.array(sizes)[:, None, None], shape)
    image = np.where(valid[..., None], image, np.nan)
    lead = (len(sizes), epochs * steps, batch)
    return {
        "image": jnp.asarray(image.reshape(*lead, FEATURES), jnp.result_type(float)),
        "label": jnp.asarray(label.reshape(lead), jnp.int32),
        "valid": jnp.asarray(valid.reshape(lead)),
    }


def begun(method, key, variables, num_clients):
    """The state before the first round, by one program and not by one for each leaf."""
    return jax.jit(method.init, static_argnums=2)(key, variables, num_clients)


def run_rounds(method, variables, batches, rounds=1, key=KEY):
    """The state and the last metrics after some rounds."""
    state = begun(method, key, variables, len(batches["valid"]))
    for _ in range(rounds):
        state, metrics = method.round(state, batches, key)
    return state, metrics


def assert_close(ours, theirs, rtol=1e-6, atol=1e-7):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), ours, theirs)


def assert_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# One program for each form of a state, not one for each leaf.
client_variables = jax.jit(federation.client_variables)
global_variables = jax.jit(federation.global_variables)


_with_own = jax.jit(federation.with_own)


def one_by_one(method, state, batches, key=KEY):
    """A deployment's clients: the state with what they keep, and their uploads, in NumPy."""
    state, batches = jax.device_get((state, batches))
    population = {"population": batches.pop("population")} if "population" in batches else {}
    sent, after, uploads = federation.broadcast_of(state), state, []
    for k in range(len(batches["valid"])):
        rows = client(batches, k) | {"client": np.int32(k)} | population
        own, upload = method.client(sent, federation.own_of(state, k), rows, key)
        after, uploads = _with_own(after, k, own), [*uploads, jax.device_get(upload)]
    return after, uploads


def stacked(uploads):
    return jax.tree.map(lambda *rows: np.stack(rows), *uploads)


def client(tree, k):
    """Row k; in NumPy, whose operations are no programs to compile."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[k], tree)


def with_value(batches, where, value, name="image"):
    """The batches with one value changed at an index of theirs."""
    changed = np.array(batches[name])
    changed[where] = value
    return batches | {name: jnp.asarray(changed)}
