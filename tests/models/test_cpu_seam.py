"""What is made for CPU acts on CPU alone; any other backend gets plain XLA."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.models import cpu
from fedjax_bn.normalization.instance import instance_moments

MAPS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 8, 16)), jnp.float32)
KERNEL = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 16, 16)), jnp.float32)

# What a function of a map runs elsewhere, by the names of its primitives.
PLAIN = {
    "convolve": (lambda x: cpu.convolve(x, KERNEL, (1, 1), "SAME"), {"conv_general_dilated"}),
    "max_pool": (lambda x: cpu.max_pool(x, (3, 3), (2, 2)), {"reduce_window_max"}),
    "in_cache": (lambda x: cpu.in_cache(lambda x: x + 1, jnp.tile(x, (200, 1, 1, 1))), {"add"}),
    "moments": (instance_moments, {"reduce_sum", "sub", "square", "div"}),
}
# What it runs on CPU and nowhere else.
MADE_FOR_CPU = {
    "convolve": "dot_general",
    "max_pool": "custom_vjp_call",
    "in_cache": "scan",
    "moments": "dot_general",
}


@pytest.fixture
def other_backend(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def primitives(function, *arguments):
    """The names of all primitives, those of inner programs too; every call traces again."""
    text = str(jax.make_jaxpr(lambda *arguments: function(*arguments))(*arguments))
    return set(re.findall(r" = (\w+)", text))


@pytest.mark.parametrize("name", PLAIN)
def test_on_cpu_the_kernel_is_taken(name):
    assert MADE_FOR_CPU[name] in primitives(PLAIN[name][0], MAPS)


@pytest.mark.usefixtures("other_backend")
@pytest.mark.parametrize("name", PLAIN)
def test_elsewhere_plain_xla_is_taken(name):
    function, plain = PLAIN[name]
    ours = primitives(function, MAPS)
    assert plain <= ours
    assert MADE_FOR_CPU[name] not in ours
