"""Models that compute in bfloat16 and are trained in float32."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import norm_nets as nets
from federations import NAMED, batches_of, run_rounds, variables_of
from fedjax_bn import adaptation, models
from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.methods import fedbn
from fedjax_bn.models import MLP
from fedjax_bn.models.feature_masks import with_masks
from fedjax_bn.models.forward import forward
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.normalization import BatchNorm
from fedjax_bn.normalization.adapter import with_adapter
from fedjax_bn.normalization.batch_instance import with_gates
from method_table import METHODS

KEY, HALF = jax.random.key(0), jnp.bfloat16
# Together they have all layers.
NETWORKS = [
    models.ConvNeXt(depths=(1, 1)),
    models.DenseNet(block_sizes=(1, 1)),
    models.DigitCNN(),
    models.ResNet(stage_sizes=(1, 1)),
    models.TinyDetector(),
    models.UNet(),
    models.ViT(depth=1),
]
IMAGES = nets.images_of(6).astype(jnp.float32)


def dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype, tree)


def traced(function, *arguments):
    """The form of the outputs, and the dtypes of matrix products and convolutions, by one trace."""
    program, outputs = jax.make_jaxpr(function, return_shape=True)(*arguments)
    pattern = r":(\w+)\[[\d,]*\] = (?:dot_general|conv_general_dilated)"
    return outputs, set(re.findall(pattern, str(program)))


# Each has seams of its own; the others share theirs with one of them.
FEW = ("fedbn", "perfedavg", "fediga", "fedcd", "hbn")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FEW else pytest.mark.slow)
        for name in METHODS
        if name != "fedwon"
    ],
)
def test_every_method_keeps_its_state_and_losses_in_float32(name):
    model = nets.HandMade()
    variables = with_masks(model, nets.variables_of(model, IMAGES), images=IMAGES)
    batches = {
        "image": jnp.tile(IMAGES, (2, 1, 1, 1, 1, 1)),
        "label": jnp.zeros((2, 1, 6), jnp.int32),
        "valid": jnp.ones((2, 1, 6), bool),
    }
    method = METHODS[name](in_dtype(model, HALF), optax.sgd(0.1), **NAMED.get(name, {}))
    state = jax.eval_shape(lambda: method.init(KEY, variables, 2))
    (after, metrics), products = traced(method.round, state, batches, KEY)
    assert dtypes(after) == dtypes(state)
    assert metrics["loss"].dtype == jnp.float32
    assert "bf16" in products


# Of running statistics, of a stream, of each sample, with an optimizer.
SOME = ("running", "tsmobn", "zero_shot_adapter", "tent")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in SOME)) for n in ADAPTATIONS]
)
def test_every_adaptation_predicts_in_float32_what_it_computes_in_bfloat16(name):
    model = nets.HandMade()
    variables = with_gates(with_adapter(KEY, model, nets.variables_of(model, IMAGES), IMAGES))
    clients = {name: variables[name] for name in ("params", "batch_stats")}
    clients = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), clients)
    variables = adaptation.with_clients(variables, clients)
    options = {"alpha": 0.5} if name == "fixed_alpha" else {}

    def predict(model):
        adapt = getattr(adaptation, name)(model, **options)
        return lambda images: adapt.predict(variables, adapt.init(variables), images)

    outputs, products = traced(predict(in_dtype(model, HALF)), IMAGES)
    assert dtypes(outputs) == dtypes(jax.eval_shape(predict(model), IMAGES))
    assert "bf16" in products


@pytest.mark.parametrize("model", NETWORKS, ids=lambda model: type(model).__name__)
def test_every_model_of_ours_gives_logits_in_float32(model):
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    variables = jax.eval_shape(model.init, KEY, images)
    half = in_dtype(model, HALF)

    def logits(variables, images):
        wanted = [] if hasattr(model, "taps") else ["features"]  # its features are maps
        return forward(half, variables, images, train=True, wanted=wanted)

    passed = jax.eval_shape(logits, variables, images)
    found = jax.tree.leaves((passed.outputs, passed.features))
    assert {leaf.dtype for leaf in found} == {jnp.dtype(jnp.float32)}
    assert dtypes(passed.moved) == dtypes({k: v for k, v in variables.items() if k != "params"})


def test_moments_are_taken_in_float32():
    x = 100 + np.random.default_rng(0).normal(size=(4096, 8))
    x = np.asarray(jnp.asarray(x, HALF))
    norm = BatchNorm(momentum=0.0)
    variables = norm.init(KEY, jnp.asarray(x))
    passed = jax.jit(partial(forward, in_dtype(norm, HALF), train=True))
    moved = passed(variables, jnp.asarray(x)).moved
    exact = x.astype(np.float64)
    np.testing.assert_allclose(moved["batch_stats"]["mean"], exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(moved["batch_stats"]["var"], exact.var(0, ddof=1), rtol=1e-4)


def test_training_in_bfloat16_follows_that_in_float32():
    net, batches = MLP(3, hidden=(8,)), batches_of((16, 12), batch=4, seed=3)
    variables = variables_of(net)
    losses = []
    for model in (net, in_dtype(net, HALF)):
        method = fedbn(model, optax.sgd(0.1))
        _, first = run_rounds(method, variables, batches)
        _, last = run_rounds(method, variables, batches, rounds=8)
        losses.append((first["loss"], last["loss"]))
    (start, end), (half_start, half_end) = np.asarray(losses)
    np.testing.assert_allclose(half_start, start, rtol=0.02)
    np.testing.assert_allclose(half_end, end, rtol=0.05)
    assert (half_end < 0.9 * start).all()
    assert (half_end != end).all()
