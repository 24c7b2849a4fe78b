"""What a run does not use leaves no trace in the program that is compiled."""

import jax
import jax.numpy as jnp
import pytest

import norm_nets as nets
from fedjax_bn import adaptation
from fedjax_bn.methods.fedig import client_agnostic_objective
from fedjax_bn.methods.learning import learning, supervised
from fedjax_bn.normalization import batch_statistics, normalize_with, running_statistics
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
    batch = {"image": images, "label": jnp.zeros(4, jnp.int32), "valid": jnp.ones(4, bool)}

    def value(objective):
        received = Received({}, {}, server=variables["batch_stats"])
        return program(lambda v, b, k: objective(v, b, received, k), variables, batch, KEY)

    learned, _ = learning(model)
    assert value(client_agnostic_objective(learned, 0.0, 0.0)) == value(supervised(learned))
