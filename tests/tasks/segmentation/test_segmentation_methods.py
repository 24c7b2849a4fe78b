"""Methods, adaptations and runs on masks: which train a U-Net, which refuse, what they compute."""

import csv
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import norm_nets as nets
import runs
import square_masks
from federations import NAMED, global_variables, in_float64
from fedjax_bn import adaptation, task
from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.methods import fedbn
from fedjax_bn.methods.learning import learning
from fedjax_bn.methods.sci import Alignment, aligned_objective
from fedjax_bn.models import MLP, UNet
from fedjax_bn.models.feature_masks import with_masks
from fedjax_bn.models.forward import forward
from fedjax_bn.models.torch_weights import to_torch
from fedjax_bn.normalization.adapter import with_adapter
from fedjax_bn.normalization.batch_instance import with_gates
from fedjax_bn.report.page import write_report
from fedjax_bn.run import evaluate as evaluate_finished
from fedjax_bn.run.evaluate import Request
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.model import MODELS, choose_task
from fedjax_bn.sharing import all_but_batch_norm, join, split, without
from fedjax_bn.simulation import simulate
from fedjax_bn.state import Received, broadcast_of, own_of
from fedjax_bn.task import segmentation
from fedjax_bn.training import score_tables as tables
from fedjax_bn.training.evaluation.answers import read_answers
from method_table import METHODS

KEY, SIDE, CLIENTS = jax.random.key(3), 16, 2
IMAGE = np.zeros((1, SIDE, SIDE, 3), np.float32)
TASK = task.segmentation(2)
# These need the logits or the features of a classifier.
REFUSING = (
    *("copa", "csac", "csd", "fedadg", "fedig", "fediga", "fedsr", "jigen", "l2d"),
    *("randconv", "rsc", "selfreg", "sfa", "snr"),
    *("fedala", "gperxan"),
)
TRAINED = tuple(sorted(set(METHODS) - set(REFUSING)))
MODEL = UNet(2, width=2, levels=1)


def model_of(name):
    return MODEL.clone(norm="none") if name == "fedwon" else MODEL


@cache
def start_of(model=MODEL):
    return nets.variables_of(model, IMAGE)


def batches_of_masks(steps=2, size=3, seed=0):
    """Bright squares on a background that differs by client; the last sample is padding."""
    rng = np.random.default_rng(seed)
    lead = (CLIENTS, steps, size)
    image = rng.normal(0, 0.3, (*lead, SIDE, SIDE, 3))
    mask = np.zeros((*lead, SIDE, SIDE), np.uint8)
    for at in np.ndindex(*lead):
        top, left = rng.integers(0, SIDE - 7, 2)
        mask[at][top : top + 7, left : left + 7] = 1
        image[at] += at[0] + 2 * mask[at][..., None]
    mask[0, 0, 0, :2] = 255
    valid = np.ones(lead, bool)
    valid[-1, -1, -1] = False
    label = {"mask": jnp.asarray(mask), "volume": jnp.zeros(lead, jnp.int32)}
    return {"image": jnp.asarray(image, jnp.float32), "label": label, "valid": jnp.asarray(valid)}


def as_read(images, dtype):
    return images.astype(dtype)


def make(name):
    given = {"task": TASK, "prepare": as_read} | NAMED.get(name, {})
    return METHODS[name](model_of(name), optax.sgd(0.05), **given)


@pytest.mark.parametrize("name", ["fedbabu", "fedrep", "fedrod", "harmofl"])
def test_a_round_of_a_method_that_reads_no_logits_of_classes_takes_masks(name):
    """Nothing is compiled here; the next test trains."""
    method, batches = make(name), batches_of_masks()
    init = partial(method.init, num_clients=CLIENTS)
    state = jax.eval_shape(init, KEY, start_of(model_of(name)))
    after, metrics = jax.eval_shape(method.round, state, batches, KEY)
    assert metrics["loss"].shape == (CLIENTS,)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_method_that_needs_no_classifier_trains_on_masks(name):
    method, start = make(name), start_of(model_of(name))
    state = jax.jit(method.init, static_argnums=2)(KEY, start, CLIENTS)
    after, metrics = method.round(jax.tree.map(jnp.copy, state), batches_of_masks(), KEY)
    assert np.isfinite(metrics["loss"]).all()
    for layer in ("head", "up1")[name == "fedbabu" :]:  # whose head never changes
        new, old = (global_variables(s)["params"][layer]["kernel"] for s in (after, state))
        assert np.abs(new - old).max() > 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.shared))


@pytest.mark.parametrize("name", REFUSING)
def test_a_method_that_needs_a_classifier_refuses_masks_in_a_sentence(name):
    said = "fedig" if name == "fediga" else name
    with pytest.raises(ValueError, match=said):
        make(name)


def test_fedcds_mask_gradient_and_penalty_on_maps_are_those_of_pytorch(x64):
    """L_e = L + lambda ||g_e - g_g||^2, and its gradient by the weights and the mask."""
    torch = pytest.importorskip("torch")
    import torch_models

    model, batch = MODEL, jax.tree.map(lambda leaf: leaf[0, 0], batches_of_masks())
    batch["image"] = batch["image"].astype(float)
    variables = with_masks(model, in_float64(start_of()))
    assert variables["mask"]["tap0"].shape == (2,)
    variables["mask"] = {"tap0": jnp.asarray([0.7, 1.2])}
    target, strength = {"tap0": jnp.asarray([0.05, -0.02])}, 0.7
    objective = aligned_objective(learning(model, prepare=as_read, task=TASK)[0], strength)
    received = Received((), (), (), Alignment(target, jnp.ones((), jnp.int32)))
    trained = {name: variables[name] for name in ("params", "mask")}

    def total(given):
        value, (_, aligned) = objective({**variables, **given}, batch, received, KEY)
        return value, aligned.gradient["tap0"]

    (value, own), slope = jax.jit(jax.value_and_grad(total, has_aux=True))(trained)

    network, functional = torch_models.UNet(2, 2, 1).double(), torch.nn.functional
    state = to_torch(MODEL, without(variables, "mask"))
    network.load_state_dict({name: torch.tensor(array) for name, array in state.items()})
    mask = torch.tensor([0.7, 1.2], dtype=torch.float64, requires_grad=True)
    images = torch.tensor(np.asarray(batch["image"])).movedim(-1, 1)
    truth = torch.tensor(np.asarray(batch["label"]["mask"]).astype(np.int64))
    logits = network(images, mask[:, None, None])[1]
    known = truth != 255
    p, y = logits.softmax(1)[:, 1][known], (truth[known] == 1).double()
    dice = (2 * (p * y).sum() + 1e-5) / (p.sum() + y.sum() + 1e-5)
    loss = 0.5 * functional.cross_entropy(logits, truth, ignore_index=255) + 0.5 * (1 - dice)
    (gradient,) = torch.autograd.grad(loss, mask, create_graph=True)
    goal = torch.tensor(np.asarray(target["tap0"]))
    expected = loss + strength * (gradient - goal).square().sum()
    expected.backward()
    np.testing.assert_allclose(own, gradient.detach(), rtol=1e-9)
    np.testing.assert_allclose(value, expected.detach(), rtol=1e-11)
    np.testing.assert_allclose(slope["mask"]["tap0"], mask.grad, rtol=1e-9)
    theirs = {name: t.grad.numpy() for name, t in network.named_parameters()}
    ours = to_torch(model, {"params": slope["params"], "batch_stats": variables["batch_stats"]})
    for name, gradient in theirs.items():
        np.testing.assert_allclose(ours[name], gradient, rtol=1e-7, atol=1e-10, err_msg=name)


@pytest.mark.slow
def test_moons_contrast_of_maps_has_the_gradient_of_pytorchs(x64):
    """mean -log e^a / (e^a + e^b): a and b are cosines of whole maps over the temperature."""
    torch = pytest.importorskip("torch")
    import torch_models

    start, batches = in_float64(start_of()), batches_of_masks(steps=1)
    batches = jax.tree.map(lambda leaf: leaf[0], batches) | {"client": jnp.zeros((), jnp.int32)}
    batches["image"] = batches["image"].astype(float)
    previous, steps = jax.tree.map(lambda leaf: 0.8 * leaf + 0.01, start), []
    for mu in (0.0, 1.0):
        method = METHODS["moon"](MODEL, optax.sgd(1.0), task=TASK, prepare=as_read, mu=mu)
        state = jax.jit(method.init, static_argnums=2)(KEY, start, 1)
        own = own_of(state, 0)
        own = own._replace(memory=own.memory._replace(method=previous))
        steps.append(method.client(broadcast_of(state), own, batches, KEY)[1].shared["params"])
    gradient = {"params": jax.tree.map(jnp.subtract, *steps)}

    networks = [torch_models.UNet(2, 2, 1).double() for _ in range(3)]
    for network, tree in zip(networks, (start, start, previous), strict=True):
        leaves = to_torch(MODEL, tree).items()
        network.load_state_dict({name: torch.tensor(array) for name, array in leaves})
    x = torch.tensor(np.asarray(batches["image"][0])).movedim(-1, 1)
    maps = [net.train(k == 0)(x)[0].flatten(1) for k, net in enumerate(networks)]
    cosine = torch.nn.functional.cosine_similarity
    a, b = (cosine(maps[0], other.detach()) / 0.5 for other in maps[1:])
    (-(a.exp() / (a.exp() + b.exp())).log().mean()).backward()
    ours = to_torch(MODEL, gradient | {"batch_stats": start["batch_stats"]})
    for name, tensor in networks[0].named_parameters():
        theirs = 0 if tensor.grad is None else tensor.grad  # the last layer has none
        np.testing.assert_allclose(ours[name], theirs, rtol=1e-7, atol=1e-10, err_msg=name)


def served(model, start):
    """Variables with all that adaptations ask for."""
    made = with_gates(start)
    clients = jax.tree.map(lambda leaf: jnp.stack([leaf, 1.5 * leaf]), made)
    made = adaptation.with_clients(made, clients)
    return with_adapter(KEY, model, made, IMAGE)


OF_CLASSIFIERS = ("shot", "t3a")
MAPS = [n for n in ADAPTATIONS if n not in OF_CLASSIFIERS]


@pytest.mark.parametrize("name", OF_CLASSIFIERS)
def test_an_adaptation_of_a_dense_classifier_refuses_a_unet(name):
    with pytest.raises(ValueError, match="UNet"):
        ADAPTATIONS[name](MODEL).init(start_of())


@pytest.mark.parametrize(("name", "channels"), [*((n, 2) for n in MAPS), ("ensemble", 1)])
def test_every_adaptation_gives_maps_of_logits(name, channels):
    model = MODEL.clone(num_classes=channels)
    variables = jax.eval_shape(partial(served, model), start_of(model))
    images = jax.ShapeDtypeStruct((3, SIDE, SIDE, 3), jnp.float32)

    def predict(variables, images, valid):
        made = ADAPTATIONS[name](model)
        return made.predict(variables, made.init(variables), images, valid)[0]

    outputs = jax.eval_shape(predict, variables, images, jax.ShapeDtypeStruct((3,), bool))
    # The ensemble of one class has the background's probability beside it.
    assert outputs.shape == (3, SIDE, SIDE, 2 if name == "ensemble" else channels)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [2, 1])
def test_the_ensemble_of_pixels_is_the_mean_of_its_members_probabilities(x64, channels):
    model = MODEL.clone(num_classes=channels)
    start = in_float64(start_of(model))
    clients = jax.tree.map(lambda leaf: jnp.stack([leaf, 1.5 * leaf + 0.1]), start)
    images = batches_of_masks()["image"][0, 0].astype(float)
    given = adaptation.with_clients(start, clients)
    ours = jax.jit(lambda given, x: adaptation.ensemble(model).predict(given, (), x)[0])
    passed = jax.jit(lambda given, x: forward(model, given, x).outputs)
    found = []
    for k in range(2):
        own = jax.tree.map(lambda leaf, k=k: leaf[k], clients)
        norms = split(own, all_but_batch_norm(own))[1]
        member = join(split(start, all_but_batch_norm(start))[0], norms)
        logits = np.asarray(passed(member, images))
        logits = logits if channels == 2 else np.concatenate([0 * logits, logits], -1)
        found.append(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(np.exp(ours(given, images)), np.mean(found, 0), rtol=1e-10)


@pytest.mark.slow
def test_a_run_on_masks_has_scores_pictures_and_a_report(monkeypatch, tmp_path):
    data = square_masks.dataset(slices=2)
    monkeypatch.setitem(experiment.DATASETS, "squares", lambda config: data)
    keys = {"model": "UNet:width=4:levels=2", "rounds": 4, "local_epochs": 4, "target": "c"}
    keys |= {"optimizer__learning_rate": 0.1, "adaptations": ("running", "tsmobn")}
    keys |= {"eval_batch_size": 4, "adapt_batch_size": 4, "data__image_size": 16}
    summary = runs.run(tmp_path, **keys, data__name="squares", predictions="csv")
    assert summary["score"] == "Dice"
    assert tables.comparison([[summary]]).startswith("Dice %")
    names = {"iou", "dice_1", "dice_2", "hd95_mm", "assd_mm", "undefined"}
    assert set(summary["measures"]["internal"]) == names
    assert set(summary["measures"]["unseen"]["c"]["tsmobn"]) == names
    for name in "ab":
        of_classes = [summary["measures"]["internal"][f"dice_{c}"][name] for c in (1, 2)]
        dice = summary["accuracy"]["internal"][name]
        np.testing.assert_allclose(np.mean(of_classes), dice, rtol=1e-5)
    kept = read_answers(tmp_path)
    assert set(kept) == {("a", ""), ("b", ""), ("c", "running"), ("c", "tsmobn")}
    for (name, adapt), one in kept.items():
        where = summary["accuracy"]["unseen" if adapt else "internal"][name]
        dice = where[adapt] if adapt else where
        np.testing.assert_allclose(100 * one.dice.mean(), dice, rtol=1e-5)
    text = (tmp_path / "answers/unseen-predictions.csv").read_text()
    rows = [*csv.DictReader(text.splitlines())]
    assert len(rows) == 2 * len(kept["c", "running"].dice) * 2
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    headings = ("Beyond Dice", "HD95 mm", "Dice of corner %", "Pixels by class and client")
    for text in (*headings, "Truth and prediction", "train: pixels"):
        assert text in page, text
    assert "accuracy by client" not in page
    result, _ = evaluate_finished.run(tmp_path, Request(internal=True), say=str)
    assert result["unseen"] == summary["accuracy"]["unseen"]
    for name, row in summary["measures"]["internal"].items():
        assert result["measures"]["internal"][name] == pytest.approx(row)


class Own(nn.Module):
    """A network of a user: logits of each pixel, or of each second one."""

    num_classes: int
    stride: int = 1

    @nn.compact
    def __call__(self, images):
        return nn.Conv(self.num_classes, (1, 1), self.stride)(images)


def test_any_network_trains_masks_whose_outputs_are_logits_of_pixels():
    def of(model, data):
        config = runs.config(model="package.module:Own")
        return choose_task(config, model(num_classes=3), data, jnp.zeros((1, 16, 16, 3)))

    assert of(Own, square_masks.dataset()).segments == 3
    for wrong in (MODELS["DigitCNN"], partial(Own, stride=2)):
        with pytest.raises(ConfigError, match="UNet"):
            of(wrong, square_masks.dataset())
    for wrong in (UNet, Own):
        with pytest.raises(ConfigError, match="classifier"):
            of(wrong, runs.DATA)


METHOD = fedbn(UNet(num_classes=3, width=2, levels=1), optax.sgd(0.1), task=segmentation(3))
OPTIONS = {"rounds": 2, "batch_size": 4, "eval_every": 1, "show_progress": False}


def test_slices_of_one_volume_are_never_divided():
    """Of one volume there is nothing to validate on, whatever the number of its slices."""
    images, masks = square_masks.samples(40, 3)
    labels = {"mask": masks, "volume": np.zeros(40, int)}
    with pytest.raises(ValueError, match="validation"):
        simulate(METHOD, clients={"a": (images, labels)}, **OPTIONS)


IMAGES, MASKS = square_masks.samples(4, 0)


@pytest.mark.parametrize(
    ("method", "labels", "said"),
    [
        (METHOD, MASKS[:, :8], r"client 'a' .*\[4, 8, 16\]"),
        (METHOD, MASKS + 1, "class 3 in mask 0"),
        (METHOD, MASKS.astype(int) - 1, "client 'a' .* label -1"),
        (METHOD, {"masks": MASKS}, r"\['masks'\]"),
        (METHOD, np.zeros(4, int), "no masks"),
        (fedbn(MLP(num_classes=3), optax.sgd(0.1)), MASKS, "masks"),
    ],
)
def test_masks_that_do_not_suit_are_refused(method, labels, said):
    with pytest.raises(ValueError, match=said):
        simulate(method, clients={"a": (IMAGES, labels)}, **OPTIONS)
