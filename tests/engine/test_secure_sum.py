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
from jax.flatten_util import ravel_pytree

import federations as fed
from fedjax_bn.aggregation import conclude, sum_uploads, weighted_part
from fedjax_bn.methods import scaffold
from fedjax_bn.methods.scaffold import keeping_variates

BITS = 32  # after the point
KEY, SIZES = jax.random.key(1), (6, 9, 4)


@pytest.mark.slow
def test_masks_that_cancel_leave_the_sums_of_a_round_as_they_are(x64):
    sgd = optax.sgd(0.1)
    method, server = scaffold(fed.OneNorm(), sgd), keeping_variates(sgd)["server"]
    state = method.init(KEY, fed.in_float64(fed.variables_of(fed.OneNorm())), len(SIZES))
    _, uploads = fed.one_by_one(method, state, fed.batches_of(SIZES), KEY)
    # A client weighs its part itself: by its number of samples, which the sum of weights divides.
    parts = [weighted_part(server, float(upload.size), upload) for upload in uploads]
    flat = [np.asarray(ravel_pytree(part)[0]) for part in parts]
    fixed_point = [np.round(x * 2.0**BITS).astype(np.int64).view(np.uint64) for x in flat]
    seen = [x.copy() for x in fixed_point]
    for i, j in itertools.combinations(range(len(SIZES)), 2):
        random = np.random.Generator(np.random.PCG64([7, i, j]))
        mask = random.integers(0, 2**64, seen[0].size, np.uint64)
        seen[i] += mask
        seen[j] -= mask
    for plain, hidden in zip(fixed_point, seen, strict=True):
        assert (plain != hidden).all()
    total = np.sum(seen, axis=0, dtype=np.uint64)
    np.testing.assert_array_equal(total, np.sum(fixed_point, axis=0, dtype=np.uint64))
    sums = ravel_pytree(parts[0])[1](jnp.asarray(total.view(np.int64) / 2.0**BITS))
    together = fed.stacked(uploads)
    expected = sum_uploads(server, jnp.asarray(SIZES, float), together)
    fed.assert_close(sums, expected, 1e-12, 2.0**-BITS * len(SIZES))
    after, finite = conclude(server, state, sums, jnp.ones(3, bool), 3)
    assert finite
    expected = method.server(state, together)
    fed.assert_close((after.shared, after.server), (expected.shared, expected.server), 1e-12, 2e-10)
