"""Our uploads are of the form that secure aggregation needs: one sum, and it survives exactly.

As in Bonawitz et al. ("Practical secure aggregation for privacy-preserving machine learning", CCS
2017) each two clients share a mask, which one adds and the other subtracts, in whole numbers modulo
2**64; here without their recovery of clients that drop out.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from federations import OneNorm, assert_close, batches_of, client, in_float64, variables_of
from fedjax_bn.aggregation import (
    Sums,
    averaging,
    conclude,
    equal_messages,
    sum_uploads,
    weighted_part,
)
from fedjax_bn.federation import broadcast_of, own_of
from fedjax_bn.methods import fedbn, scaffold
from fedjax_bn.methods.scaffold import averaging_with_variate

BITS = 32  # after the point
KEY, SIZES = jax.random.key(1), (6, 9, 4)


def encoded(sums: Sums) -> np.ndarray:
    """All numbers of one client's part of the sums, in fixed point modulo 2**64."""
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(sums)])
    assert np.abs(flat).max() < 2.0 ** (62 - BITS)
    return np.round(flat * 2.0**BITS).astype(np.int64).view(np.uint64)


def decoded(total: np.ndarray, like: Sums) -> Sums:
    """The sums that a total is."""
    flat = total.view(np.int64) / 2.0**BITS
    leaves, form = jax.tree.flatten(like)
    parts = np.split(flat, np.cumsum([leaf.size for leaf in leaves])[:-1])
    parts = (part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True))
    return jax.tree.unflatten(form, map(jnp.asarray, parts))


def masked(vectors: list[np.ndarray]) -> list[np.ndarray]:
    """What the server sees of each client: its numbers, hidden by the masks that it shares."""
    seen = [vector.copy() for vector in vectors]
    for i, j in itertools.combinations(range(len(vectors)), 2):
        random = np.random.Generator(np.random.PCG64([7, i, j]))
        mask = random.integers(0, 2**64, vectors[0].size, np.uint64)
        seen[i] += mask
        seen[j] -= mask
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "server"), [(fedbn, averaging()), (scaffold, averaging_with_variate())]
)
def test_masks_that_cancel_leave_the_sums_of_a_round_as_they_are(x64, make, server):
    method, variables = make(OneNorm(), optax.sgd(0.1)), in_float64(variables_of(OneNorm()))
    state, batches = method.init(KEY, variables, len(SIZES)), batches_of(SIZES)
    uploads = []
    for k, size in enumerate(SIZES):
        mine = client(batches, k) | {"client": jnp.int32(k)}
        uploads.append(method.client(broadcast_of(state), jax.jit(own_of)(state, k), mine, KEY)[1])
        assert int(uploads[-1].size) == size
    # A client weighs its part itself: by its number of samples, which the sum of weights divides.
    part = jax.jit(lambda weight, upload: weighted_part(server, weight, upload))
    parts = [part(float(upload.size), upload) for upload in uploads]
    vectors = list(map(encoded, parts))
    seen = masked(vectors)
    total = np.sum(seen, axis=0, dtype=np.uint64)
    np.testing.assert_array_equal(total, np.sum(vectors, axis=0, dtype=np.uint64))
    for one, hidden in zip(vectors, seen, strict=True):
        assert (one != hidden).all()
        assert abs(np.corrcoef(one.view(np.int64) * 1.0, hidden.view(np.int64) * 1.0)[0, 1]) < 0.3
    sums = decoded(total, parts[0])
    together = jax.tree.map(lambda *rows: jnp.stack(rows), *uploads)
    plain = sum_uploads(server, jnp.asarray(SIZES, float), together)
    assert_close(sums, plain, 1e-12, 2.0**-BITS * len(SIZES))
    after, finite = conclude(server, state, sums, jnp.ones(3, bool), 3)
    expected = method.server(state, together)
    assert finite
    assert_close(after.shared, expected.shared, 1e-12, 2.0**-BITS)
    assert_close(after.server, expected.server, 1e-12, 2.0**-BITS)
    assert (server.message_weight is equal_messages) == (make is scaffold)
