"""What a run does not use leaves no trace in the program that is compiled."""

import jax
import jax.numpy as jnp
import pytest

import norm_nets as nets
from fedjax_bn import adaptation
from fedjax_bn.normalization import batch_statistics, normalize_with, running_statistics


def program(function, *arguments):
    return str(jax.make_jaxpr(function)(*arguments))


@pytest.mark.parametrize("model", [nets.HandMade(), nets.Remat()])
def test_rules_that_are_not_chosen_add_nothing_to_a_pass(model):
    images = nets.images_of(4).astype(jnp.float32)
    variables = nets.variables_of(model, images)
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
