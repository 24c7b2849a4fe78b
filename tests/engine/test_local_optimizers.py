"""Local optimizers over rounds: schedules, what cannot work over a round, masks, and losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
import runs
from fedjax_bn.contrib import apfl, fedrep, fedsam
from fedjax_bn.local_step import by_round
from fedjax_bn.methods import fedavg, feddc, fednova, scaffold
from fedjax_bn.normalization.batch_instance import keep_gates
from fedjax_bn.run.experiment.method import local_optimizer
from fedjax_bn.sharing import nothing

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
