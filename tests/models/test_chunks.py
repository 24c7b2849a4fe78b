"""Batches in chunks are the same batches, and only where no sample needs another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import norm_nets as nets
from fedjax_bn import adaptation
from fedjax_bn.adaptation import with_clients
from fedjax_bn.models.cpu.bilinear import in_chunks
from fedjax_bn.normalization.adapter import with_adapter

KEY = jax.random.key(0)
MODEL = nets.HandMade()
MANY = 6000  # images of 6 x 6 x 3 values, in three chunks
PER_SAMPLE = {
    "running": adaptation.running,
    "iabn": lambda model: adaptation.iabn(model, 0.5),
    "zero_shot_adapter": adaptation.zero_shot_adapter,
    "ensemble": adaptation.ensemble,
}


def variables_for(name, images):
    variables = nets.variables_of(MODEL, images)
    if name == "zero_shot_adapter":
        adapted = with_adapter(KEY, MODEL, variables, images)
        random = np.random.default_rng(0)
        shake = lambda leaf: leaf + 0.1 * random.standard_normal(leaf.shape)  # noqa: E731
        return adapted | {"adapter": jax.tree.map(shake, adapted["adapter"])}
    if name == "ensemble":
        clients = jax.tree.map(lambda x: np.stack([x, np.float64(1.5) * x]), variables)
        return with_clients(variables, clients)
    return variables


# One chunk, whole chunks, chunks of which the last is filled, chunks of one sample.
@pytest.mark.parametrize(("count", "size"), [(2, 20), (8, 8), (8, 4), (9, 4), (7, 3), (9, 1)])
def test_chunks_are_the_whole_in_order_and_never_larger_than_asked(count, size):
    x, seen = np.arange(count * 2.0).reshape(count, 2), []

    def function(chunk):
        seen.append(len(chunk))
        return jnp.square(chunk).sum(1)

    np.testing.assert_array_equal(in_chunks(function, jnp.asarray(x), size), (x**2).sum(1))
    assert max(seen) <= size
    assert len(set(seen)) == 1  # one program, whatever the remainder


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PER_SAMPLE)
def test_a_batch_in_chunks_is_predicted_as_its_samples_are(name):
    images = nets.images_of(MANY)
    variables = variables_for(name, images)
    adapt = PER_SAMPLE[name](MODEL)
    logits, carry = jax.jit(adapt.predict)(variables, adapt.init(variables), images)
    assert carry == ()
    one = jax.jit(lambda image: adapt.predict(variables, (), image)[0][0])
    for i in (0, MANY // 2, MANY - 1):  # one of each chunk
        np.testing.assert_allclose(logits[i], one(images[i : i + 1]), rtol=1e-9, atol=1e-12)


def test_no_batch_is_cut_whose_statistics_or_alphas_are_of_the_whole():
    """Chunks are a loop in the program; nothing is compiled here."""
    images = nets.images_of(MANY)
    variables = nets.variables_of(MODEL, images)

    def loops(adapt):
        program = jax.make_jaxpr(adapt.predict)(variables, adapt.init(variables), images)
        return "scan[" in str(program)

    assert loops(adaptation.running(MODEL))
    assert not loops(adaptation.batch(MODEL))
    assert not loops(adaptation.tsmobn(MODEL, 0.9))
    assert not loops(adaptation.fixed_alpha(MODEL, jnp.linspace(0, 1, MANY)))
