"""Flax's own batch norms, linen's and nnx's, are served as ours are."""

from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import norm_nets
from federations import assert_close
from fedjax_bn import adaptation
from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.methods import fedbn, fedig
from fedjax_bn.models import from_nnx, to_nnx
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization import BatchNorm, Statistics, batch_statistics
from fedjax_bn.normalization.tsmobn import update

KEY = jax.random.key(3)
SGD = optax.sgd(0.1)
METHODS = {
    "fedbn": partial(fedbn, optimizer=SGD),
    "fediga": partial(fedig, optimizer=SGD, adapter=True),
}


class Ours(nn.Module):
    """A batch norm with maps and one with vectors, with flax's momentum and biased variance."""

    @nn.compact
    def __call__(self, images):
        x = nn.Dense(4, name="conv")(images)
        x = nn.relu(BatchNorm(0.8, unbiased=False, name="first")(x)).mean((1, 2))
        x = nn.relu(BatchNorm(0.8, unbiased=False, name="last")(nn.Dense(5, name="dense")(x)))
        return nn.Dense(2, name="out")(x)


class Linen(nn.Module):
    """As users of linen write it: the model hands `use_running_average` on."""

    @nn.compact
    def __call__(self, images, train):
        def norm(x, name):
            return nn.BatchNorm(use_running_average=not train, momentum=0.8, name=name)(x)

        x = nn.relu(norm(nn.Dense(4, name="conv")(images), "first")).mean((1, 2))
        x = nn.relu(norm(nn.Dense(5, name="dense")(x), "last"))
        return nn.Dense(2, name="out")(x)


class Nnx(nnx.Module):
    """As users of nnx write it."""

    def __init__(self, rngs):
        self.conv = nnx.Linear(3, 4, rngs=rngs)
        self.first = nnx.BatchNorm(4, momentum=0.8, rngs=rngs)
        self.dense = nnx.Linear(4, 5, rngs=rngs)
        self.last = nnx.BatchNorm(5, momentum=0.8, rngs=rngs)
        self.out = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.first(self.conv(images))).mean((1, 2))
        return self.out(nnx.relu(self.last(self.dense(x))))


MODELS = {"ours": Ours(), "linen": Linen(), "nnx": from_nnx(Nnx(nnx.Rngs(0)))}
THEIRS = ("linen", "nnx")


def images_of(count, seed=0):
    return norm_nets.images_of(count, seed, (2, 3, 3))


def variables_of(seed=0):
    """Values for all of the three."""
    return norm_nets.variables_of(Ours(), images_of(2), seed)


def batches_of(sizes=(4, 3), batch=3, steps=2):
    """[K, S, B] with padding that holds NaN, which must not matter."""
    valid = np.arange(steps * batch) < np.array(sizes)[:, None]
    lead = (len(sizes), steps, batch)
    images = np.stack([images_of(steps * batch, seed) for seed in range(len(sizes))])
    images = np.where(valid[..., None, None, None], images, np.nan)
    label = jax.random.randint(jax.random.key(0), lead, 0, 2, jnp.int32)
    return {
        "image": images.reshape(*lead, *images.shape[2:]),
        "label": label,
        "valid": valid.reshape(lead),
    }


@cache
def trained(method, name):
    """All that two rounds leave, in float64."""
    method = METHODS[method](MODELS[name], clients="map")
    state = method.init(KEY, variables_of(), 2)
    for _ in range(2):
        state, metrics = method.round(state, batches_of(), KEY)
    return client_variables(state), global_variables(state), metrics


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("fedbn", "linen"),
        ("fedbn", "nnx"),
        *(pytest.param("fediga", name, marks=pytest.mark.slow) for name in THEIRS),
    ],
)
def test_two_rounds_are_those_of_our_batch_norm(method, name):
    assert_close(trained(method, name), trained(method, "ours"), rtol=1e-12, atol=1e-12)


def by_flax(name, variables, images):
    """A training pass that flax makes alone: outputs and moved statistics."""
    if name == "linen":
        apply = lambda *given: Linen().apply(*given, True, mutable=["batch_stats"])  # noqa: E731
        return jax.jit(apply)(variables, images)
    net = to_nnx(Nnx(nnx.Rngs(0)), variables)
    net.train()
    outputs = net(images)
    moved = {
        norm: {"mean": getattr(net, norm).mean[...], "var": getattr(net, norm).var[...]}
        for norm in ("first", "last")
    }
    return outputs, {"batch_stats": moved}


class Scanned(nnx.Module):
    """Two batch norms in one loop, and one that is called twice."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def make(rngs):
            return nnx.BatchNorm(3, rngs=rngs)

        self.loop, self.twice = make(rngs), nnx.BatchNorm(3, rngs=rngs)
        self.again = self.twice

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def body(x, layer):
            return layer(x)

        return nnx.remat(lambda layer, x: layer(x))(self.again, self.twice(body(x, self.loop)))


def test_rules_reach_batch_norms_inside_the_transformations_of_nnx():
    x = images_of(4)[:, 0, 0].astype(jnp.float32)
    model = from_nnx(Scanned(nnx.Rngs(0)))

    def rule(layer, x, valid):
        pair = update((layer.mean, layer.var), x, 0.5)
        return Statistics(*pair, moved=pair)

    tracked = jax.jit(partial(forward, model, statistics=rule, wanted=["moved"]))
    moved = tracked(model.init(KEY, x), x).moved["batch_stats"]
    once = jnp.zeros(3), jnp.ones(3)
    loop, y = [], x
    for pair in (once, once):
        loop.append(update(pair, y, 0.5))
        y = (y - loop[-1][0]) / jnp.sqrt(loop[-1][1] + 1e-5)
    twice = update(once, y, 0.5)
    twice = update(twice, (y - twice[0]) / jnp.sqrt(twice[1] + 1e-5), 0.5)
    for i, name in enumerate(("mean", "var")):
        expected = jnp.stack([pair[i] for pair in loop])
        np.testing.assert_allclose(moved["loop"][name], expected, 1e-4, 1e-5)
        # a module that two names share goes by the first of them
        np.testing.assert_allclose(moved["again"][name], twice[i], 1e-4, 1e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", THEIRS)
def test_a_training_pass_is_flaxs_own_where_no_sample_is_padding(name):
    """Running variances of flax are biased, its momentum is kept."""
    variables, images = variables_of(), images_of(6)
    ours = jax.jit(partial(forward, MODELS[name], train=True))(variables, images)
    with jax.numpy_dtype_promotion("standard"):  # flax's own needs it
        outputs, moved = by_flax(name, variables, images)
    assert_close(ours.outputs, outputs, rtol=1e-5)
    assert_close(ours.moved, moved, rtol=1e-5)
    x = np.asarray(images @ variables["params"]["conv"]["kernel"])
    x = x + np.asarray(variables["params"]["conv"]["bias"])
    biased = 0.8 * variables["batch_stats"]["first"]["var"] + 0.2 * x.var((0, 1, 2))
    np.testing.assert_allclose(ours.moved["batch_stats"]["first"]["var"], biased, rtol=1e-12)


class OwnNorm(nn.Module):
    """Running statistics in a module that is not a known batch norm."""

    @nn.compact
    def __call__(self, x):
        mean = self.variable("batch_stats", "mean", jnp.zeros, x.shape[-1:])
        return x - mean.value


class OwnLinen(nn.Module):
    """It stands among others."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(OwnNorm(name="mine")(nn.BatchNorm(use_running_average=True)(x)))


class OwnNnxNorm(nnx.BatchNorm):
    """A batch norm that does something of its own."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class OwnNnx(nnx.Module):
    """It stands alone."""

    def __init__(self, rngs):
        self.mine = OwnNnxNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.mine(x)


@pytest.mark.parametrize("model", [OwnLinen(), from_nnx(OwnNnx(nnx.Rngs(0)))], ids=["linen", "nnx"])
@pytest.mark.parametrize("adapt", ["batch", "tsmobn", "iabn"])
def test_running_statistics_that_no_rule_reaches_are_refused_by_name(model, adapt):
    x = jnp.ones((2, 3))
    variables = model.init(KEY, x)
    made = ADAPTATIONS[adapt](model)
    with pytest.raises(ValueError, match="'mine'"):
        made.predict(variables, made.init(variables), x)
    assert adaptation.running(model).predict(variables, (), x)[0].shape[0] == 2


class Odd(nn.Module):
    """One batch norm with unusual options."""

    options: tuple = ()
    mask: bool = False

    @nn.compact
    def __call__(self, x):
        norm = nn.BatchNorm(use_running_average=True, name="odd", **dict(self.options))
        return norm(x, mask=x > 0) if self.mask else norm(x)


@pytest.mark.parametrize(
    "model", [Odd((("axis", 1),)), Odd((("axis_name", "data"),)), Odd(mask=True)]
)
def test_options_that_rules_do_not_know_are_refused(model):
    x = jnp.ones((2, 3, 4))
    variables = model.init(KEY, x)
    with pytest.raises(ValueError, match="'odd'"):
        forward(model, variables, x, statistics=batch_statistics)


def test_a_bare_nnx_module_and_a_class_are_refused_with_the_remedy():
    net, x = OwnNnx(nnx.Rngs(0)), jnp.ones((2, 3))
    with pytest.raises(ValueError, match="from_nnx"):
        forward(net, {}, x)
    with pytest.raises(ValueError, match=r"Net\(rngs=nnx\.Rngs\(0\)\)"):
        from_nnx(OwnNnx)
    with pytest.raises(ValueError, match="lack params/mine/"):
        forward(from_nnx(net), {"params": {}}, x)
    more = from_nnx(net).init(KEY, x)
    more["params"]["yours"] = {"kernel": x}
    with pytest.raises(ValueError, match="has no params/yours/kernel"):
        forward(from_nnx(net), more, x)
