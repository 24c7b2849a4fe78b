"""Methods train detectors: every one whose idea needs no logits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import norm_nets as nets
from detectors import CLASSES, Detector
from federations import assert_close, run_rounds
from fedjax_bn.adaptation import ensemble, mixnorm, running, tent, tsmobn, with_clients
from fedjax_bn.federation import global_variables
from fedjax_bn.models.forward import forward
from fedjax_bn.tasks.detection import Recipe, detection
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
