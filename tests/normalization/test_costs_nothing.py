"""What a run does not use leaves no trace in the program that is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import norm_nets as nets
from fedjax_bn import adaptation
from fedjax_bn.methods.fedig import client_agnostic_objective
from fedjax_bn.methods.learning import learning, supervised
from fedjax_bn.normalization import (
    batch_statistics,
    normalize_with,
    running_statistics,
)
from fedjax_bn.normalization.mixig import constant, mixed_statistics
from fedjax_bn.state import Received

MODELS = [nets.HandMade(), nets.Remat()]
KEY = jax.random.key(0)


def program(function, *arguments):
    """The text of what is traced; names of inner functions, which say nothing, are the same."""
    return str(jax.make_jaxpr(function)(*arguments))


def ready(model, count=4):
    images = nets.images_of(count).astype(jnp.float32)
    return nets.variables_of(model, images), images


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_rules_that_are_not_chosen_add_nothing_to_a_pass(model):
    variables, images = ready(model)
    plain = program(model.apply, variables, images)
    for adapt in (adaptation.running(model), adaptation.stateless(model, running_statistics)):
        assert program(lambda v, x, a=adapt: a.predict(v, (), x)[0], variables, images) == plain

    def trained(variables, images, rule=None, inside=True):
        if not inside:
            return model.apply(variables, images, mutable=["batch_stats"])
        with normalize_with(rule):
            return model.apply(variables, images, mutable=["batch_stats"])

    bare = program(lambda v, x: trained(v, x, inside=False), variables, images)
    assert program(trained, variables, images) == bare
    assert program(lambda v, x: trained(v, x, batch_statistics), variables, images) == bare


def test_fedig_without_its_losses_is_the_objective_of_fedbn():
    model = MODELS[0]
    variables, images = ready(model)
    batch = {
        "image": images,
        "label": jnp.zeros(4, jnp.int32),
        "valid": jnp.ones(4, bool),
    }

    def value(objective):
        received = Received({}, {}, server=variables["batch_stats"])
        return program(lambda v, b, k: objective(v, b, received, k), variables, batch, KEY)

    learned, _ = learning(model)
    assert value(client_agnostic_objective(learned, 0.0, 0.0)) == value(supervised(learned))


@pytest.mark.parametrize(
    "model", [pytest.param(MODELS[0], marks=pytest.mark.slow), MODELS[1]], ids=["HandMade", "Remat"]
)
def test_mixig_of_one_u_is_a_fixed_alpha_in_spatial_layers_under_every_transformation(x64, model):
    """u = 0: global statistics, u = 1: instance normalization, in a hand-made model."""
    images = nets.images_of(8).reshape(2, 4, 6, 6, 3)
    variables = nets.variables_of(model, images[0])
    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("clients",)), PartitionSpec("clients")

    def mixed(images, u):
        with normalize_with(mixed_statistics(KEY, constant(u))):
            return model.apply(variables, images)

    def scan(images, u):
        return jax.lax.scan(lambda carry, batch: (carry, mixed(batch, u)), None, images)[1]

    at_once = jax.vmap(mixed, (0, None))
    sharded = jax.shard_map(
        at_once, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
    )

    def fixed_alpha(images, u):
        return adaptation.fixed_alpha(model, u).predict(variables, (), images)[0]

    one, fixed, *others = (jax.jit(way) for way in (mixed, fixed_alpha, at_once, sharded, scan))
    for u in (0.0, 0.4, 1.0):
        loop = np.stack([one(batch, u) for batch in images])
        for other in others:
            np.testing.assert_allclose(other(images, u), loop, rtol=1e-9, atol=1e-12)
        if isinstance(model, nets.Remat):
            np.testing.assert_allclose(loop[0], fixed(images[0], u), rtol=1e-10)
    if isinstance(model, nets.Remat):
        running = jax.jit(model.apply)(variables, images[0])
        np.testing.assert_allclose(one(images[0], 0.0), running, rtol=1e-10)
