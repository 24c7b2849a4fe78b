"""Local training: class weights, focal loss, measures of one class; clips, rates, optimizers."""

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
from fedjax_bn.contrib import apfl, fedrep, fedsam
from fedjax_bn.engine.optimizers import response
from fedjax_bn.local_step import by_round
from fedjax_bn.methods import fedavg, feddc, fednova, scaffold
from fedjax_bn.normalization.batch_instance import keep_gates
from fedjax_bn.run.experiment.method import local_optimizer
from fedjax_bn.sharing import nothing
from fedjax_bn.state import Received

KEY, NET, SIZES = fed.KEY, fed.OneNorm(), (9, 4, 6)
START = fed.variables_of(NET)
DECAY = optax.exponential_decay(0.1, 1, 0.5)  # 0.1, 0.05, 0.025


@pytest.mark.slow
@pytest.mark.parametrize("make", [scaffold, fednova, feddc, apfl, fedrep])
def test_a_rate_of_the_round_is_that_of_methods_built_for_each_round(make):
    """The methods built by hand have a plain rate each, that of the first round and the second."""
    method = make(NET, by_round(lambda round: optax.sgd(DECAY(round), momentum=0.9)))
    batches = fed.batches_of(SIZES)
    state, expected = fed.begun(method, KEY, START, 3), fed.begun(method, KEY, START, 3)
    for rate in (0.1, 0.05):
        state, _ = method.round(state, batches, KEY)
        expected, _ = make(NET, optax.sgd(rate, momentum=0.9)).round(expected, batches, KEY)
    assert method.round._cache_size() == 1  # nothing is compiled again
    fed.assert_close(state.shared, expected.shared, rtol=1e-5, atol=1e-6)
    fed.assert_close(state.personal, expected.personal, rtol=1e-5, atol=1e-6)
    fed.assert_close(state.memory, expected.memory, rtol=1e-4, atol=1e-5)


def test_a_rate_of_the_round_and_of_the_step_in_it_is_optaxs_over_all_steps():
    """One client with 3 steps a round: as one round of 9 steps with optax's own schedule."""
    rate = optax.cosine_decay_schedule(0.1, 9)
    optimizer = by_round(lambda round: optax.sgd(lambda step: rate(3 * round + step)))
    batches = jax.tree.map(lambda leaf: leaf[:1], fed.batches_of((12, 12)))
    ours, _ = fed.run_rounds(fedavg(NET, optimizer), START, batches, rounds=3)
    thrice = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * 3, 1), batches)
    plain = fedavg(NET, by_round(lambda round: optax.sgd(rate)))
    expected, _ = fed.run_rounds(plain, START, thrice)
    fed.assert_close(ours.shared, expected.shared, rtol=1e-5, atol=1e-6)


AFRESH = {
    "schedule": optax.sgd(optax.piecewise_constant_schedule(0.1, {3: 0.0})),
    "injected": optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0, 9)),
    "gathering": optax.MultiSteps(optax.sgd(0.1), 5),
    "decay": optax.adamw(0.1, weight_decay=optax.linear_schedule(0.1, 0, 9)),
    "noise": optax.noisy_sgd(0.1, key=KEY),
    "prodigy": optax.contrib.prodigy(),
    "in a part": optax.multi_transform(
        {"a": optax.sgd(optax.linear_schedule(0.1, 0, 9)), "b": optax.sgd(0.1)},
        lambda params: {name: "a" if name == "a" else "b" for name in params},
    ),
}


@pytest.mark.parametrize("name", AFRESH)
def test_what_starts_again_every_round_is_refused_unless_clients_keep_it(name):
    with pytest.raises(ValueError, match="keep_optimizer"):
        fedavg(NET, AFRESH[name]).init(KEY, START, 3)
    fedavg(NET, AFRESH[name], keep_optimizer=True).init(KEY, START, 3)


TRAINING = [
    (optax.MultiSteps(by_round(lambda round: optax.sgd(0.1)), 2), True),
    (optax.polyak_sgd(max_learning_rate=0.1), False),
    (optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), False),
    (optax.contrib.schedule_free(optax.sgd(0.1), 0.1), False),
]


@pytest.mark.parametrize(("optimizer", "keep"), TRAINING)
def test_optimizers_train_with_what_a_local_step_gives_them(optimizer, keep):
    """With fresh states those that are refused move the loss by less than a hundredth here."""
    method = fedavg(fed.PlainNet(), optimizer, keep_optimizer=keep)
    state, losses = fed.begun(method, KEY, fed.variables_of(fed.PlainNet()), 3), []
    for _ in range(48):
        state, metrics = method.round(state, fed.batches_of(SIZES, epochs=5), KEY)
        losses.append(metrics["loss"].mean())
    assert min(losses) < 0.9 * losses[0]


def pure_noise():
    return optax.chain(optax.scale(0.0), optax.add_noise(1.0, 0.0, key=3))


@pytest.mark.parametrize(
    ("noise", "keep"), [(pure_noise, True), (lambda: by_round(lambda round: pure_noise()), False)]
)
def test_clients_and_rounds_draw_other_noise_and_repeat_it(noise, keep):
    """Clients with nothing but noise in their steps, which share nothing: all moves differ."""
    method = fedavg(fed.PlainNet(), noise(), keep_optimizer=keep, share=nothing)
    batches = fed.batches_of((4, 4, 4))
    state = fed.begun(method, KEY, fed.variables_of(fed.PlainNet()), 3)
    places = [np.concatenate([np.ravel(x) for x in rows]) for rows in by_client(state)]
    moves = []
    for _ in range(3):
        state, _ = method.round(state, batches, KEY)
        after = [np.concatenate([np.ravel(x) for x in rows]) for rows in by_client(state)]
        moves += [new - old for new, old in zip(after, places, strict=True)]
        places = after
    # 21 numbers each: a correlation of independent ones has the deviation 1 / sqrt(21) = 0.22.
    assert np.abs(np.corrcoef(moves) - np.eye(9)).max() < 0.9
    np.testing.assert_allclose(np.std(moves), 1, rtol=0.3)
    again, _ = fed.run_rounds(method, fed.variables_of(fed.PlainNet()), batches, 3)
    fed.assert_equal(again.personal, state.personal)


def by_client(state):
    return [jax.tree.leaves(fed.client(state.personal, k)) for k in range(3)]


def test_masks_and_labels_over_parameters_are_those_over_collections():
    """The three forms give one program, which trains what the labels let it train."""
    params = START["params"]
    one = sorted(params)[:1]
    by_module = {module: "sgd" if module in one else "stays" for module in params}
    mask = {module: dict.fromkeys(params[module], label) for module, label in by_module.items()}
    by_label = {"sgd": optax.sgd(0.1, 0.9), "stays": optax.set_to_zero()}
    forms = (mask, {"params": mask}, lambda params: by_module)
    made = [fednova(NET, optax.multi_transform(by_label, labels)) for labels in forms]
    given = fed.begun(made[0], KEY, START, 3), fed.batches_of(SIZES), KEY
    programs = {method.round.lower(*given).as_text() for method in made}
    assert len(programs) == 1
    found = fed.run_rounds(made[0], START, fed.batches_of(SIZES), rounds=2)[0].shared
    for module, leaves in found["params"].items():
        # The mean of equal leaves may round.
        same = [np.allclose(a, params[module][name], 1e-6) for name, a in leaves.items()]
        assert all(same) is (module not in one)


@pytest.mark.parametrize(
    "optimizer",
    [0.1, optax.lookahead(optax.sgd(0.1), 5, 0.5), optax.adamw(0.1, mask={"nowhere": True}), {}],
)
def test_an_optimizer_that_no_local_step_serves_is_refused(optimizer):
    with pytest.raises(ValueError, match=r"local optimizer|optimizer=(0|\{\})|is not optax"):
        fedavg(NET, optimizer).init(KEY, START, 3)


def test_methods_that_wrap_the_optimizer_pass_the_round_on():
    """Rate 0 from the second round on: the model stays where it is."""
    optimizer = by_round(lambda round: optax.sgd(jnp.where(round < 1, 0.1, 0.0)))
    clipped = optax.chain(optax.adaptive_grad_clip(0.1), keep_gates(optimizer))
    method, batches = fedsam(NET, clipped, variates=True), fed.batches_of(SIZES)
    state, _ = fed.run_rounds(method, START, batches)
    after_first = jax.device_get(state.shared["params"])
    state, _ = method.round(state, batches, KEY)
    fed.assert_close(state.shared["params"], after_first, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schedule": "cosine"}, lambda r: 0.05 * (1 + np.cos(np.pi * r / 6))),
        (
            {"schedule": "cosine:rounds=4:final=0.2"},
            lambda r: 0.1 * (0.2 + 0.4 * (1 + np.cos(np.pi * min(r, 4) / 4))),
        ),
        ({"schedule": "step:rounds=2"}, lambda r: 0.1 * 0.1 ** (r // 2)),
        ({"schedule": "exponential:rounds=2:factor=0.5"}, lambda r: 0.1 * 0.5 ** (r / 2)),
        ({"warmup_rounds": 3}, lambda r: 0.1 * min((r + 1) / 4, 1)),
        (
            {"schedule": "cosine", "warmup_rounds": 2},
            lambda r: 0.1 * (r + 1) / 3 if r < 2 else 0.05 * (1 + np.cos(np.pi * (r - 2) / 4)),
        ),
    ],
)
def test_configured_rates_have_their_closed_form(changes, expected):
    keys = {f"optimizer__{key}": value for key, value in changes.items()}
    config = runs.config(optimizer__learning_rate=0.1, **keys)
    optimizer, ones = local_optimizer(config), jnp.ones(1)
    steps = [optimizer.update(ones, optimizer.init(ones), ones, round=r)[0] for r in range(6)]
    rates = [expected(r) for r in range(6)]
    np.testing.assert_allclose(-np.ravel(steps), rates, rtol=1e-5, atol=1e-8)


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
        return sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradient)), step

    for k in range(3):
        squares, step = by_hand(start["params"], batches["image"][k, 0], batches["label"][k, 0])
        assert squares > 0.1**2
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
