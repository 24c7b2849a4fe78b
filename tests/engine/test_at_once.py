"""How many clients a TPU or GPU trains at once, from programs of one client with known loops."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_bn.engine.at_once import clients_at_once
from fedjax_bn.engine.backend import traced_for
from fedjax_bn.engine.devices import map_and_sum

MEGABYTE = 2**20


def client_of(carried, products):
    """A client whose steps carry so many megabytes and make products of so many."""

    def train(row, weights):
        def step(weights, x):
            made = jnp.ones((products * MEGABYTE // 4, 1)) @ x
            return weights + made.sum(), ()

        return jax.lax.scan(step, weights, jnp.zeros((3, 1, 1)))[0].sum(), row, ()

    shapes = (jax.ShapeDtypeStruct((), jnp.float32),)
    shapes += (jax.ShapeDtypeStruct((carried * MEGABYTE // 4,), jnp.float32),)
    return train, shapes


@pytest.mark.parametrize(
    ("carried", "products", "clients", "expected"),
    [
        (1, 1, 8, 8),  # small: all
        (16, 1, 8, 4),  # four fit into half of 128 MB
        (16, 1, 6, 3),  # three divide six, so that none is left over
        (16, 1, 5, 4),  # only one divides five
        (300, 1, 5, 1),  # never less than one
        (1, 700, 8, 2),  # the maps of two take less than 1.5 GB
    ],
)
def test_as_many_clients_as_fit_into_the_memories(carried, products, clients, expected):
    train, shapes = client_of(carried, products)
    with traced_for("tpu"):
        assert clients_at_once(jax.make_jaxpr(train)(*shapes).jaxpr, clients) == expected


@pytest.mark.parametrize(
    ("side", "dtype", "clients", "expected"),
    [
        (0, jnp.float32, 8, 8),  # no convolution
        (512, jnp.float32, 900, 450),  # the maps of 512 fit into 8 GB, and 450 divide all
        (1024, jnp.float32, 8, 1),  # 64 MB
        (16, jnp.bfloat16, 8, 1),  # grouped convolutions in 16 bits are slow in any size
    ],
)
def test_a_gpu_trains_few_clients_at_once_whose_convolutions_are_large(
    side, dtype, clients, expected
):
    def train(image, kernel):
        def step(kernel, image):
            maps = jax.lax.conv(image, kernel, (1, 1), "SAME") if side else image
            return kernel + maps.mean(), ()

        return jax.lax.scan(step, kernel, image)[0]

    image = jax.ShapeDtypeStruct((3, 1, 1, side or 8, side or 8), dtype)
    program = jax.make_jaxpr(train)(image, jax.ShapeDtypeStruct((16, 1, 3, 3), dtype)).jaxpr
    with traced_for("cuda"):
        assert clients_at_once(program, clients) == expected


def test_auto_follows_the_rule_of_the_platform():
    train, shapes = client_of(16, 1)
    rows, weights = (jax.ShapeDtypeStruct((6, *x.shape), x.dtype) for x in shapes)

    def together(rows, weights):
        return map_and_sum(train, "auto", rows, weights)

    def groups(platform):
        """The lengths of the loops over clients and over steps."""
        with traced_for(platform):
            program = jax.make_jaxpr(together)(rows, weights)
        return {int(part.split()[0]) for part in str(program).split("length=")[1:]}

    assert groups("tpu") == {2, 3}  # two groups of three clients; three steps
    assert groups("cpu") == {6, 3}
    assert groups("cuda") == {3}
