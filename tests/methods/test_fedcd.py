"""FedCD and its SCI: what travels, what it reduces to, what a run keeps."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
import runs
import small_oracle
from fedjax_bn.aggregation import by_size, uniform
from fedjax_bn.methods import fedbn, fedcd
from fedjax_bn.methods.learning import learning
from fedjax_bn.methods.sci import Alignment, aligned_objective
from fedjax_bn.models.forward import forward
from fedjax_bn.report.page import write_report
from fedjax_bn.sharing import all_but_batch_norm
from fedjax_bn.state import Received
from small_oracle import SmallNet

KEY = jax.random.key(5)
SGD = optax.sgd(0.1, momentum=0.5)
SIZES = (9, 4, 6)
FROZEN = STILL = optax.set_to_zero()
NET = fed.OneNorm()


@cache
def start():
    return fed.variables_of(NET)


@cache
def method_of(optimizer=SGD, epochs=1, **options):
    """Each is compiled once."""
    return fedcd(NET, optimizer, local_epochs=epochs, **options)


def two_rounds(rounds=2, batches=None, epochs=1, start=start, **options):
    method = method_of(epochs=epochs, **options)
    batches = fed.batches_of(SIZES, epochs=epochs) if batches is None else batches
    return fed.run_rounds(method, start(), batches, rounds)


def test_without_penalty_with_fixed_masks_and_sizes_as_weights_it_is_the_plain_method(x64):
    """FedAvg by its sharing rule, and so FedBN by FedBN's."""
    share = all_but_batch_norm
    same = {"mask_optimizer": FROZEN, "weigh": by_size, "share": share}
    state, metrics = two_rounds(lambda_sci=0.0, start=lambda: fed.in_float64(start()), **same)
    other, theirs = fed.run_rounds(
        fedbn(NET, SGD), fed.in_float64(start()), fed.batches_of(SIZES), 2
    )
    masks_ = fed.global_variables(state)["mask"]
    for variables in (fed.client_variables, fed.global_variables):
        ours = {name: tree for name, tree in variables(state).items() if name != "mask"}
        fed.assert_close(ours, variables(other), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(masks_["features"], np.ones(8), rtol=1e-12)
    np.testing.assert_allclose(metrics["loss"], theirs["loss"], rtol=1e-9)


def test_the_first_round_has_no_penalty_and_the_second_has(x64):
    begin = {"start": lambda: fed.in_float64(start())}
    first = [two_rounds(rounds=1, lambda_sci=value, **begin)[0] for value in (0.0, 0.7)]
    fed.assert_close(first[0], first[1], rtol=1e-9, atol=1e-12)
    second = [two_rounds(rounds=2, lambda_sci=value, **begin) for value in (0.0, 0.7)]
    shared = jax.device_get([state.shared for state, _ in second])
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), *shared)
    assert max(jax.tree.leaves(gaps)) > 1e-5
    losses = [np.asarray(metrics["step_loss"])[:, 0] for _, metrics in second]
    assert (losses[0] < losses[1]).all()


def gradients_by_hand(variables, batches, epoch):
    """g_e of a model that does not move, by client: the mean over the samples of one epoch."""
    batches = jax.device_get(batches)
    steps = batches["valid"].shape[1] // 2

    @jax.jit
    def gradient(images, labels, valid):
        def loss(mask):
            held = {**variables, "mask": {"features": mask}}
            clean = jnp.where(valid[:, None], images, 0)
            logits = forward(NET, held, clean, train=True, valid=valid).outputs
            logs = jax.nn.log_softmax(logits)[jnp.arange(4), labels]
            return -jnp.where(valid, logs, 0).sum()

        return jax.grad(loss)(jnp.ones(8))

    means = []
    for k in range(len(SIZES)):
        total, count = np.zeros(8), 0
        for s in range(epoch * steps, (epoch + 1) * steps):
            valid = batches["valid"][k, s]
            if not valid.any():
                continue
            total = total + gradient(batches["image"][k, s], batches["label"][k, s], valid)
            count += int(valid.sum())
        means.append(total / count)
    return np.stack(means)


def test_the_server_averages_the_last_epochs_gradients_by_size_whatever_the_weights():
    batches = fed.batches_of(SIZES, epochs=2)
    other = fed.batches_of(SIZES, epochs=2, seed=1)  # so that the epochs differ
    for name in ("image", "label"):
        halves = np.asarray(batches[name])[:, :3], np.asarray(other[name])[:, 3:]
        batches[name] = np.concatenate(halves, 1)
    still = {"optimizer": STILL, "weigh": uniform}
    state, _ = two_rounds(rounds=1, batches=batches, epochs=2, **still)
    means = gradients_by_hand(start(), batches, epoch=1)
    expected = np.average(means, axis=0, weights=SIZES)
    np.testing.assert_allclose(
        state.server.sent.gradient["features"], expected, rtol=2e-4, atol=1e-6
    )
    some = batches | {"participates": jnp.asarray([True, False, True])}
    state, _ = two_rounds(rounds=1, batches=some, epochs=2, **still)
    expected = np.average(means[[0, 2]], axis=0, weights=[9, 6])
    np.testing.assert_allclose(
        state.server.sent.gradient["features"], expected, rtol=2e-4, atol=1e-6
    )


def test_clients_that_keep_their_local_state_sum_up_gradients_anew_each_round():
    still = {"optimizer": STILL, "keep_optimizer": True}
    one, _ = two_rounds(rounds=1, **still)
    three, _ = two_rounds(rounds=3, **still)
    fed.assert_close(three.server.sent.gradient, one.server.sent.gradient, rtol=1e-5)
    np.testing.assert_array_equal(three.memory.step.count, SIZES)
    assert int(three.server.sent.rounds) == 3


def test_masks_stay_with_their_clients_and_an_unseen_one_gets_their_mean():
    state, metrics = two_rounds()
    assert state.shared["mask"] == {"features": None}
    own = np.asarray(state.personal["mask"]["features"])
    assert np.abs(own[0] - own[1]).max() > 1e-4
    served = fed.global_variables(state)["mask"]["features"]
    np.testing.assert_allclose(served, metrics["weights"] @ own, rtol=1e-5)
    np.testing.assert_array_equal(fed.client_variables(state)["mask"]["features"], own)


def test_masks_stay_within_their_bounds():
    free, bound = (
        two_rounds(**options)[0].personal["mask"]["features"]
        for options in ({}, {"bounds": (0.99, 1.0)})
    )
    assert float(free.min()) < 0.99 < 1 < float(free.max())
    np.testing.assert_array_equal((bound.min(), bound.max()), np.float32((0.99, 1)))


def test_a_word_spells_where_the_masks_are_and_what_trains_them():
    """In Python and in words it is one program."""
    word = {"names": "features, a", "bounds": ("0", "1")}  # as a configuration has it
    word |= {"mask_optimizer": "sgd:learning_rate=0.1:momentum=0.5"}
    made = {"names": ("features", "a"), "bounds": (0.0, 1.0), "mask_optimizer": SGD}
    both = [method_of(**options) for options in (word, made)]
    variables = start()
    given = (
        jax.eval_shape(lambda: fed.begun(both[0], KEY, variables, 3)),
        fed.batches_of(SIZES),
        KEY,
    )
    assert len({method.round.lower(*given).as_text() for method in both}) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lambda_sci", float("nan")),
        ("names", "a,a"),
        ("names", "pool"),
        ("bounds", (1.0, 0.0)),
        ("mask_optimizer", "adam:learning_rate=0"),
    ],
)
def test_wrong_arguments_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option}|{value}"):
        fedcd(NET, SGD, **{option: value}).init(KEY, start(), 3)


@pytest.mark.slow
def test_a_run_keeps_masks_their_mean_and_their_norm_of_every_round(tmp_path):
    adaptations = ("running", "running:mask=False")
    folder = runs.finished(tmp_path, method="fedcd:eta=3.0", rounds=2, adaptations=adaptations)
    write_report(folder)
    lines = runs.lines(folder)
    files = sorted((folder / "masks").iterdir())
    assert [file.name for file in files] == ["0001.npz", "0002.npz"]
    for line, file in zip(lines, files, strict=True):
        with np.load(file) as stored:
            own, mean = stored["features"], stored["features.mean"]
            assert stored["clients"].tolist() == list(runs.NAMES[:3])
        norms = dict(zip(runs.NAMES, np.abs(own).sum(1).tolist(), strict=False))
        assert line["mask_l1"] == pytest.approx(norms | {"mean": np.mean(list(norms.values()))})
        weights = [line["weights"][name] for name in runs.NAMES[:3]]
        np.testing.assert_allclose(mean, weights @ own, rtol=1e-5)
    assert lines[0]["mask_l1"] != lines[1]["mask_l1"]


def test_sci_gives_the_reference_numbers(shared, x64):
    stored = small_oracle.load(shared)
    variables = small_oracle.variables_from(stored, "init")
    variables["mask"] = {"features": jnp.asarray(stored["sci__mask"])}
    batch = {
        "image": jnp.asarray(stored["sci__x"]),
        "label": jnp.asarray(stored["sci__y"], jnp.int32),
        "valid": jnp.ones(8, bool),
    }
    learned, _ = learning(SmallNet(), prepare=lambda images, dtype: images.astype(dtype))
    objective = aligned_objective(learned, float(stored["sci__lam"]))
    server = Alignment({"features": jnp.asarray(stored["sci__global_gradient"])}, jnp.int32(1))

    def both(trained):
        return objective({**variables, **trained}, batch, Received((), (), (), server), KEY)

    trained = {name: variables[name] for name in ("params", "mask")}
    step = jax.jit(jax.value_and_grad(both, has_aux=True))
    (total, (_, reported)), gradients = step(trained)
    close = partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-14)
    close(reported.loss, stored["sci__cross_entropy"])
    close(total, stored["sci__total"])
    close(reported.gradient["features"], stored["sci__mask_gradient"])
    close(gradients["mask"]["features"], stored["sci__grad__mask"])
    params = gradients["params"]
    for layer in ("fc1", "fc2"):
        close(params[layer]["kernel"].T, stored[f"sci__grad__{layer}.weight"])
        close(params[layer]["bias"], stored[f"sci__grad__{layer}.bias"])
    for ours, theirs in (("scale", "weight"), ("bias", "bias")):
        close(params["bn1"][ours], stored[f"sci__grad__bn1.{theirs}"])
