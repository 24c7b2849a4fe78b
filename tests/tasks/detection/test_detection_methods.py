"""Detectors: their loss against PyTorch, and methods and adaptations that train them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import norm_nets as nets
from detectors import ANCHORS, CLASSES, Detector, labels, outputs
from federations import assert_close, run_rounds
from fedjax_bn.adaptation import ensemble, mixnorm, running, tent, tsmobn, with_clients
from fedjax_bn.federation import global_variables
from fedjax_bn.models.forward import forward
from fedjax_bn.tasks.detection import Recipe, detection, detection_loss
from method_table import METHODS

MODEL = Detector()
TASK = detection(MODEL.anchors, recipe=Recipe(scaled=False))
SGD = optax.sgd(0.1)
KEY = jax.random.key(3)


def as_read(images, dtype):
    return images.astype(dtype)


def start():
    return nets.variables_of(MODEL, jnp.zeros((1, 32, 32, 3)))


def detector_batches(clients=2, steps=2, size=3, seed=0):
    """Images with boxes that they show, bright by class; the last image of the last client is
    padding, and one has no box.
    """
    rng = np.random.default_rng(seed)
    lead = (clients, steps, size)
    image = rng.normal(0, 0.1, (*lead, 32, 32, 3))
    boxes, number = np.zeros((*lead, 2, 4)), np.full((*lead, 2), -1, np.int32)
    for at in np.ndindex(*lead):
        for j in range(2 if at != (0, 0, 0) else 0):
            low = rng.integers(0, 20, 2)
            high = low + rng.integers(6, 12, 2)
            number[(*at, j)] = rng.integers(0, CLASSES)
            boxes[(*at, j)] = np.concatenate([low, high]) / 32
            image[at][low[1] : high[1], low[0] : high[0], number[(*at, j)]] += 1 + at[0]
    valid = np.ones(lead, bool)
    valid[-1, -1, -1] = False
    label = {"boxes": jnp.asarray(boxes, float), "class": jnp.asarray(number)}
    return {"image": jnp.asarray(image, float), "label": label, "valid": jnp.asarray(valid)}


def make(name, optimizer=SGD, **options):
    return METHODS[name](MODEL, optimizer, task=TASK, prepare=as_read, **options)


TRAINED = (
    *("fedavg", "fedprox", "fedbn", "silobn", "singleset", "scaffold", "fednova", "fedadam"),
    *("feddc", "perfedavg", "fedcd", "feddg"),
)


def of_name(name):
    own = {"fedadam": {"eta": 0.03}, "feddg": {"spectra": 2}}
    return make(name, optax.sgd(0.05), **own.get(name, {}))


@pytest.mark.parametrize("name", ["scaffold", "fedsam", "harmofl", "mixstyle"])
def test_a_round_of_a_method_that_needs_no_logits_takes_boxes(name):
    """Nothing is compiled here; that losses fall is shown by the slow test below."""
    method, variables, batches = of_name(name), start(), detector_batches()
    state = jax.eval_shape(lambda key, variables: method.init(key, variables, 2), KEY, variables)
    after, metrics = jax.eval_shape(method.round, state, batches, KEY)
    assert metrics["loss"].shape == (2,)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_method_that_needs_no_logits_trains_a_detector(name):
    method, variables, batches = of_name(name), start(), detector_batches()
    state = method.init(KEY, variables, 2)
    losses = []
    for _ in range(10):
        state, metrics = method.round(state, batches, KEY)
        losses.append(np.asarray(metrics["loss"]))
    assert np.isfinite(losses).all()
    assert (losses[-1] < 0.9 * losses[0]).all(), losses


@pytest.mark.parametrize(
    "name", ["moon", "fedig", "copa", "csd", "fedsr", "jigen", "randconv", "rsc", "selfreg"]
)
def test_a_method_that_needs_logits_refuses_with_a_sentence(name):
    with pytest.raises(ValueError, match=f"{name} needs the logits .*'mAP50'.* fedbn"):
        make(name)


def test_fedavg_of_detectors_is_a_loop_over_clients_and_steps(x64):
    batches = detector_batches()

    @jax.jit
    def step(variables, image, label, valid):
        def value(params):
            out = forward(MODEL, {**variables, "params": params}, image, train=True, valid=valid)
            return TASK.loss(out.outputs, label, valid), out.moved

        (loss, moved), slope = jax.value_and_grad(value, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda w, g: w - 0.1 * g, variables["params"], slope)
        return {"params": params, **moved}, loss

    variables = start()
    for _ in range(2):
        trained = []
        for k in range(2):
            own = variables
            for s in range(2):
                given = jax.tree.map(lambda leaf, k=k, s=s: leaf[k, s], batches)
                blank = given["valid"]
                image = jnp.where(blank[:, None, None, None], given["image"], 0)
                own, _ = step(own, image, given["label"], blank)
            trained.append(own)
        variables = jax.tree.map(lambda a, b: (6 * a + 5 * b) / 11, *trained)
    state, _ = run_rounds(make("fedavg"), start(), batches, 2)
    assert_close(global_variables(state), variables, rtol=1e-10, atol=1e-12)


def test_adaptations_of_batch_norm_predict_and_the_ensemble_of_logits_refuses():
    variables, images = start(), detector_batches()["image"][0, 0]
    for adaptation in (running(MODEL), tsmobn(MODEL), mixnorm(MODEL)):
        carry = adaptation.init(variables)
        (outputs,), _ = jax.eval_shape(adaptation.predict, variables, carry, images)
        assert outputs.shape == (3, 4, 4, 2, 8)
    clients = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), variables)
    own = with_clients(variables, clients)
    for adaptation in (ensemble(MODEL), tent(MODEL)):
        carry = jax.eval_shape(adaptation.init, own)
        with pytest.raises(ValueError, match="gives no logits"):
            jax.eval_shape(adaptation.predict, own, carry, images)


torch = pytest.importorskip("torch")
ALL = np.ones(4, bool)


def loss(outs, label, valid, recipe=None):
    return detection_loss(outs, label, valid, ANCHORS, recipe)


judge = jax.jit(jax.value_and_grad(loss), static_argnames="recipe")  # compiled once in float64


def by_torch(outs, label, images, **options):
    """The loss of some of the images, which looks at matches alone, and its gradient."""
    import torch_yolo

    given = [torch.tensor(np.float64(out[images]), requires_grad=True) for out in outs]
    boxes, classes = (torch.tensor(label[name][images]) for name in ("boxes", "class"))
    value = torch_yolo.detection_loss(given, boxes, classes.long(), ANCHORS, **options)
    value.backward()
    return value.item(), [out.grad.numpy() for out in given]


@pytest.mark.parametrize(
    ("drawn", "scaled"),
    [({}, True), ({"seed": 1}, True), ({}, False), ({"classes": 1}, True)],
    ids=["seed 0", "seed 1", "plain gains", "a single class, which has no loss of classes"],
)
def test_the_loss_and_its_gradient_are_those_of_pytorch(x64, drawn, scaled):
    label, outs = labels(**drawn), outputs(**drawn)
    assert (label["class"] >= 0).sum() > 10  # boxes that are learned
    value, gradient = judge(outs, label, ALL, recipe=None if scaled else Recipe(scaled=False))
    expected, slopes = by_torch(outs, label, ALL, scaled=scaled)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for ours, theirs in zip(gradient, slopes, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-13)


def test_the_order_of_boxes_and_what_lies_in_padding_change_nothing(x64):
    label, outs = labels(), outputs()
    value, gradient = judge(outs, label, ALL)
    order = np.random.default_rng(0).permutation(6)
    shuffled = {name: leaf[:, order] for name, leaf in label.items()}
    padding = label["class"] < 0
    odd = {
        "boxes": np.where(padding[..., None], [0.3, 0.2, 0.9, 0.1], label["boxes"]),
        "class": np.where(padding, -2 - 1, label["class"]).astype(np.int32),  # crowds of class 1
    }
    for other in (shuffled, odd):
        same, slopes = judge(outs, other, ALL)
        np.testing.assert_allclose(same, value, rtol=1e-14)
        for ours, theirs in zip(slopes, gradient, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-15)


def test_images_that_are_not_valid_change_nothing(x64):
    """A blank image has the labels of class 0 that padding of a batch leaves."""
    label, outs, valid = labels(), outputs(), np.array([1, 1, 0, 1], bool)
    blank = {
        name: np.where(valid.reshape(4, *[1] * (x.ndim - 1)), x, 0) for name, x in label.items()
    }
    blank["class"] = blank["class"].astype(np.int32)
    value, gradient = judge(outs, blank, valid)
    np.testing.assert_allclose(value, by_torch(outs, label, valid)[0], rtol=1e-12)
    moved = [np.where(valid[:, None, None, None, None], out, 3 * out) for out in outs]
    np.testing.assert_allclose(judge(tuple(moved), blank, valid)[0], value, rtol=1e-14)
    assert not any(np.asarray(slope[2]).any() for slope in gradient)
    assert judge(outs, blank, np.zeros(4, bool))[0] == 0


def test_boxes_without_area_teach_objectness_alone(x64):
    outs, label = outputs(), labels()
    flat = {"boxes": label["boxes"][..., [0, 1, 0, 3]], "class": label["class"]}
    none = {"boxes": flat["boxes"], "class": np.full_like(label["class"], -1)}
    for ours, theirs in zip(judge(outs, flat, ALL)[1], judge(outs, none, ALL)[1], strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_array_equal(ours, theirs)


def test_under_vmap_and_shard_map_and_in_float32_it_is_the_same():
    label, outs = labels(), outputs()
    single = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == float else x, (outs, label))
    pairs = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), single)
    each = jax.vmap(lambda *given: loss(*given, jnp.ones(2, bool)))
    mesh, rows = Mesh(np.array(jax.devices()[:2]), ("clients",)), PartitionSpec("clients")
    ours = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=rows, out_specs=rows))(*pairs)
    theirs = [by_torch(outs, label, at)[0] for at in (slice(0, 2), slice(2, 4))]
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)


def test_outputs_of_16_bits_have_the_loss_of_their_values(x64):
    label, outs = labels(), [jnp.asarray(raw, jnp.float16) for raw in outputs()]
    value, _ = judge(outs, label, ALL)
    expected, _ = by_torch(outs, label, ALL)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
