"""Programs traced here for another platform hold nothing that was made for CPU.

Every operation of a lowered program names the file and line that it comes from.
"""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from federations import NAMED
from fedjax_bn import models
from fedjax_bn.adaptation import with_clients
from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.engine import backend
from fedjax_bn.engine.backend import traced_for
from fedjax_bn.federation import broadcast_of, own_of
from fedjax_bn.local_step import differentiate
from fedjax_bn.methods.learning import learning, supervised
from fedjax_bn.normalization import arithmetic
from fedjax_bn.normalization.adapter import with_adapter
from fedjax_bn.normalization.batch_instance import with_gates
from fedjax_bn.state import Received
from fedjax_bn.task import segmentation
from fedjax_bn.tasks.detection import detection
from method_table import METHODS

ELSEWHERE = ("cuda", "tpu")
KEY = jax.random.key(0)
CLIENTS, BATCH, CLASSES = 3, 4, 3
IMAGES = jax.ShapeDtypeStruct((BATCH, 8, 8, 3), jnp.float32)


def lines_of(function):
    lines, first = inspect.getsourcelines(function)
    return range(first, first + len(lines))


# A convolution in groups, which `vmap` makes of the clients' own kernels.
GROUPED = re.compile(r"(?:feature|batch)_group_count = (?!1\b)\d+")
# These have one form on every platform; all else in their file is made for CPU.
FORMS = (backend.where_tree, backend.all_finite, backend._finite, backend._finite_on_gpu)
EVERYWHERE = {line for function in FORMS for line in lines_of(function)}


class Network(models.SmallCNN):
    """A small network with a pooling layer."""

    def features(self, images):
        return super().features(self.max_pool(images, 3, 1, 1))


NETWORK = Network(CLASSES, widths=(16, 16))


def lowered(function, *arguments, platforms=ELSEWHERE):
    """The text of a program for these platforms; arguments are arrays or their forms."""
    program = jax.jit(function).trace(*arguments).lower(lowering_platforms=platforms)
    return program.as_text(debug_info=True)


def made_for_cpu(text):
    """The files of kernels made for CPU, and of the seam, that a program has operations of."""
    found = set(re.findall(r"models/cpu/(?!__init__)\w+\.py", text))
    lines = map(int, re.findall(r'fedjax_bn/engine/backend\.py":(\d+)', text))
    return found | {"engine/backend.py" for line in lines if line not in EVERYWHERE}


def lowered_elsewhere(function, *arguments):
    """The same, traced for an accelerator: nothing in it was made for CPU."""
    with traced_for("cuda"), pytest.MonkeyPatch.context() as patch:
        # It is inside a custom_jvp, where older versions of JAX name no lines: a call would fail.
        patch.setattr(arithmetic, "sample_moments_on_cpu", None)
        text = lowered(function, *arguments)
    assert not made_for_cpu(text)
    assert "callback" not in text
    return text


def variables_of(model, images=IMAGES):
    """The form of a model's variables."""
    return jax.eval_shape(model.init, KEY, images)


def batch_of(images=IMAGES, lead=()):
    """The form of a batch, or of many."""
    count = images.shape[0]
    return {
        "image": jax.ShapeDtypeStruct((*lead, *images.shape), images.dtype),
        "label": jax.ShapeDtypeStruct((*lead, count), jnp.int32),
        "valid": jax.ShapeDtypeStruct((*lead, count), bool),
    }


def parts_of(method):
    """`all_parts(state, batches, key)`: a round, and the client and the server by themselves."""

    def all_parts(state, batches, key):
        one = jax.tree.map(lambda x: x[0], batches) | {"client": jnp.zeros((), jnp.int32)}
        own, upload = method.client(broadcast_of(state), own_of(state, 0), one, key)
        uploads = jax.tree.map(lambda x: jnp.stack([x] * CLIENTS), upload)
        return method.round(state, batches, key), own, method.server(state, uploads)

    return all_parts


def method_and_state(name, model=NETWORK, images=IMAGES, clients="auto", **options):
    given = NAMED.get(name, {}) | {"clients": clients} | options
    method = METHODS[name](model, optax.sgd(0.1, momentum=0.5), **given)
    init = functools.partial(method.init, num_clients=CLIENTS)
    return method, jax.eval_shape(init, KEY, variables_of(model, images))


APART = ("fedbn", "scaffold", "fedcd")  # without a message, with one, weighed by risks
# What asks for the platform: rules for batch norms, gradients of gradients, convolutions of data.
OFTEN = (*APART, "fediga", "feddg", "hbn", "l2d")


@pytest.mark.parametrize(
    ("name", "clients"),
    [
        pytest.param(n, c, marks=[pytest.mark.slow] * (n not in (OFTEN if c == "map" else APART)))
        for n in METHODS
        for c in ("map", "vmap")
        if n != "fedwon"  # FedAvg, of networks without batch norm
    ],
)
def test_every_method_is_lowered_for_accelerators(name, clients):
    """Only `vmap` makes a grouped convolution of the clients' own kernels."""
    method, state = method_and_state(name, clients=clients)
    parts = parts_of(method) if name in APART else method.round
    text = lowered_elsewhere(parts, state, batch_of(lead=(CLIENTS, 2)), KEY)
    assert "stablehlo.convolution" in text
    assert "reduce_window" in text
    assert bool(GROUPED.search(text)) == (clients == "vmap")


def test_what_is_made_for_cpu_is_found_where_it_is():
    """Where no platform is given, the kernels are those of the machine that traces."""
    method, state = method_and_state("fedbn")
    predict = ADAPTATIONS["running"](NETWORK).predict

    def both(state, batches, key, variables, images):
        return method.round(state, batches, key), predict(variables, (), images)

    images = jax.ShapeDtypeStruct((1000, 16, 16, 3), jnp.float32)
    given = state, batch_of(lead=(CLIENTS, 2)), KEY, variables_of(NETWORK), images
    found = made_for_cpu(lowered(both, *given, platforms=("cpu",)))
    kernels = {f"models/cpu/{name}.py" for name in ("bilinear", "convolution", "pooling")}
    assert kernels | {"engine/backend.py"} <= found


# Of running statistics, of a stream, of each sample, with an optimizer.
SOME = ("running", "tsmobn", "zero_shot_adapter", "tent")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in SOME)) for n in ADAPTATIONS]
)
def test_every_adaptation_is_lowered_for_accelerators(name):
    adaptation = ADAPTATIONS[name](NETWORK)

    def variables():
        made = with_gates(NETWORK.init(KEY, jnp.zeros(IMAGES.shape)))
        stacked = jax.tree.map(lambda x: jnp.stack([x] * CLIENTS), made)
        made = with_clients(made, stacked)
        return with_adapter(KEY, NETWORK, made, jnp.zeros(IMAGES.shape))

    def predict(variables, images, valid):
        carry = adaptation.init(variables)
        return adaptation.predict(variables, carry, images, valid)

    batch = batch_of()
    given = jax.eval_shape(variables), batch["image"], batch["valid"]
    text = lowered_elsewhere(predict, *given)
    assert "stablehlo.convolution" in text


# One network of each kind of layers.
SMALL = {
    "DenseNet": {"block_sizes": (1, 1)},
    "DigitCNN": {},
    "ResNet": {"stage_sizes": (1, 1), "bottleneck": True},
    "TinyDetector": {},
    "UNet": {"width": 8, "levels": 2},
    "ViT": {"width": 8, "depth": 1, "heads": 2, "image_size": 32},
    "ConvNeXt": {"width": 4, "depths": (1, 1)},
}


@pytest.mark.parametrize("name", SMALL)
def test_every_model_is_lowered_for_accelerators(name):
    """Its gradient on a batch, and what it says of as many images as a CPU takes in chunks.

    Only ConvNeXt has grouped layers of its own.
    """
    model = getattr(models, name)(num_classes=CLASSES, **SMALL[name])
    side = 28 if name == "DigitCNN" else 32
    images = jax.ShapeDtypeStruct((BATCH, side, side, 3), jnp.float32)
    many = jax.ShapeDtypeStruct((1000, *images.shape[1:]), jnp.float32)
    batch = batch_of(images)
    if anchors := getattr(model, "anchors", None):
        options = {"task": detection(anchors)}
        boxes = jax.ShapeDtypeStruct((BATCH, 3, 4), jnp.float32)
        batch["label"] = {"boxes": boxes, "class": jax.ShapeDtypeStruct((BATCH, 3), jnp.int32)}
    elif name == "UNet":
        options = {"task": segmentation(CLASSES)}
        batch["label"] = {"mask": jax.ShapeDtypeStruct(images.shape[:3], jnp.uint8)}
    else:
        options = {}
    gradient = differentiate(supervised(learning(model, **options)[0]))
    running = ADAPTATIONS["running"](model)

    def both(variables, batch, images):
        learned = gradient(variables, batch, Received(variables, ()), KEY)
        return learned, running.predict(variables, (), images)

    text = lowered_elsewhere(both, variables_of(model, images), batch, many)
    assert "stablehlo.convolution" in text
    assert bool(GROUPED.search(text)) == name.startswith("ConvNeXt")
