"""Class weights and focal loss against PyTorch and scikit-learn; measures of one class; clips."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.utils.class_weight import compute_class_weight

import federations as fed
import fedjax_bn as fb
import runs
from fedjax_bn import task
from fedjax_bn.engine.optimizers import response
from fedjax_bn.methods import fedavg
from fedjax_bn.run.experiment.method import local_optimizer
from fedjax_bn.sharing import nothing
from fedjax_bn.state import Received

WEIGHTS = (0.5, 4.0, 1.0)
PLAIN = fed.PlainNet()


def drawn():
    """Logits and labels of 30 samples, the last 6 of which are padding; no sample has class 2."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(30, 3)), rng.integers(0, 2, 30).astype(np.int32), np.arange(30) < 24


def theirs(logits, label, weights, gamma):
    """PyTorch's loss and gradient; with gamma (1 - p)^gamma times each loss of the mean."""
    torch = pytest.importorskip("torch")
    x, weights = torch.tensor(logits, requires_grad=True), torch.tensor(weights).double()
    label = torch.tensor(label.astype(np.int64))
    losses = torch.nn.functional.cross_entropy(x, label, reduction="none")
    loss = (weights[label] * (1 - torch.exp(-losses)) ** gamma * losses).sum()
    loss = loss / weights[label].sum()
    if not gamma:
        loss = torch.nn.functional.cross_entropy(x, label, weight=weights)
    loss.backward()
    return loss.item(), x.grad.numpy()


@pytest.mark.parametrize(
    ("weights", "gamma"),
    [(None, 1.5), (np.array(WEIGHTS), 0), ("0.5,4,1", 1.5), ("balanced", 0), ("balanced", 1.5)],
)
def test_losses_are_pytorchs(x64, weights, gamma):
    logits, label, valid = drawn()
    expected_weights = np.ones(3) if weights is None else np.array(WEIGHTS)
    if isinstance(weights, str) and weights == "balanced":
        balanced = compute_class_weight("balanced", classes=np.arange(2), y=label[valid])
        expected_weights = np.append(balanced, 0)
    chosen = task.classification(class_weights=weights, focal=gamma)
    value, slope = jax.jit(jax.value_and_grad(chosen.loss))(jnp.asarray(logits), label, valid)
    expected, gradient = theirs(logits[valid], label[valid], expected_weights, gamma)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(slope[valid], gradient, rtol=1e-10, atol=1e-15)
    assert not slope[~valid].any()
    if chosen.mean_loss:  # of all samples, however they are divided
        parts = [chosen.mean_loss.of_batch(*(x[i::4] for x in drawn())) for i in range(4)]
        np.testing.assert_allclose(chosen.mean_loss.of_all(np.stack(parts)), expected, rtol=1e-12)


def test_a_sure_answer_has_a_finite_gradient():
    for gamma in (0.1, 1.0, 3.0):
        loss = task.classification(focal=gamma).loss
        slope = jax.grad(loss)(jnp.array([[800.0, -800.0]] * 2), jnp.arange(2), np.ones(2, bool))
        assert np.isfinite(slope).all()


@pytest.mark.parametrize("weights", [[-1, 1, 1], [0, 0, 0], "balaned", [np.nan, 1, 1], [1, 2], {}])
def test_wrong_weights_are_refused(weights):
    with pytest.raises(ValueError, match="class_weights"):
        task.classification(class_weights=weights).loss(jnp.zeros((30, 3)), *drawn()[1:])


def test_a_client_is_balanced_by_its_own_labels():
    """As alone with scikit-learn's weights of them; the second client lacks a class."""
    batches = fed.batches_of((9, 6), epochs=2)
    label = np.where(
        np.arange(2)[:, None, None] == 1, np.minimum(batches["label"], 1), batches["label"]
    )
    batches["label"] = jnp.asarray(label)
    start = fed.variables_of(PLAIN)
    options = {"share": nothing, "local_epochs": 2}
    method = fedavg(PLAIN, fed.SGD, task=task.classification(class_weights="balanced"), **options)
    state, _ = fed.run_rounds(method, start, batches)
    for k in range(2):
        y = label[k][np.asarray(batches["valid"][k])]
        weights = np.zeros(3)
        weights[np.unique(y)] = compute_class_weight("balanced", classes=np.unique(y), y=y)
        alone = fedavg(PLAIN, fed.SGD, task=task.classification(class_weights=weights), **options)
        expected, _ = fed.run_rounds(
            alone, start, jax.tree.map(lambda x, k=k: x[k : k + 1], batches)
        )
        fed.assert_close(
            fed.client(state.personal, k), fed.client(expected.personal, 0), 1e-5, 1e-6
        )


def test_measures_of_one_class_are_undefined_and_in_no_mean():
    rng = np.random.default_rng(0)
    images, label = rng.normal(size=(16, 6)).astype(np.float32), np.arange(16) % 2
    samples = {"ant": (images, label), "bee": (images, label), "cow": (images, 0 * label)}
    clients = {k: dict.fromkeys(("train", "validation", "test"), x) for k, x in samples.items()}
    method = fedavg(PLAIN, fed.SGD, task=task.classification(class_weights="balanced"))
    summary = fb.simulate(method, clients=clients, rounds=1, show_progress=False).summary
    inside = summary["measures"]["internal"]
    assert inside["counts"] == {"ant": [8, 8, 0], "bee": [8, 8, 0], "cow": [16, 0, 0]}
    for name in ("auc", "balanced_accuracy"):
        values = inside[name]
        assert values["cow"] is None
        np.testing.assert_allclose(values["mean"], (values["ant"] + values["bee"]) / 2)
        assert summary["measures_over"][name] == 2
    assert inside["auc_interval"]["cow"] is None
    assert summary["measures_over"]["loss"] == 3


def test_each_clients_gradient_is_clipped_as_by_optax():
    config = runs.config(optimizer__name="sgd:clip=0.1", optimizer__weight_decay=0.5)
    method = fedavg(PLAIN, local_optimizer(config), share=nothing, clients="vmap")
    batches, start = fed.batches_of((4, 4, 4)), fed.variables_of(PLAIN)
    state, _ = fed.run_rounds(method, start, batches)

    @jax.jit
    def by_hand(params, image, label):
        def loss(params):
            logits = PLAIN.apply({"params": params}, image)
            return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

        gradient, rate = jax.grad(loss)(params), config.optimizer.learning_rate
        clipped = optax.clip_by_global_norm(0.1).update(gradient, optax.EmptyState())[0]
        step = jax.tree.map(lambda w, g: w - rate * (g + 0.5 * w), params, clipped)
        return optax.global_norm(gradient), step

    for k in range(3):
        norm, step = by_hand(start["params"], batches["image"][k, 0], batches["label"][k, 0])
        assert norm > 0.1
        fed.assert_close(fed.client(state.personal, k)["params"], step, 1e-5, 1e-6)


@pytest.mark.parametrize("clip", [optax.clip_by_global_norm(0.01), optax.clip(0.01)])
def test_the_way_of_an_optimizer_is_that_without_its_clip(clip):
    """By it SCAFFOLD, FedNova and FedDC divide a change, to get the mean of clipped gradients."""
    received, sgd = Received(fed.variables_of(PLAIN), {"params": {}}), optax.sgd(0.1, 0.9)
    received = received._replace(personal=jax.tree.map(lambda leaf: None, received.shared))
    ways = [
        response(optimizer, jnp.int32(3), 4, jnp.float32, received)
        for optimizer in (sgd, optax.chain(clip, sgd))
    ]
    np.testing.assert_array_equal(*ways)
