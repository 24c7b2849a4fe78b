"""A trained federation on unseen and internal clients, its choices by text, its records."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import norm_nets as nets
import runs
from fedjax_bn import adaptation
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.arguments.errors import CheckpointError
from fedjax_bn.data.domain import Domain, Split
from fedjax_bn.engine.images import standardize
from fedjax_bn.federation import global_variables
from fedjax_bn.methods import fedbn
from fedjax_bn.normalization.adapter import with_adapter
from fedjax_bn.run.experiment.build import read_evaluation
from fedjax_bn.run.files.finished_run import restore_state
from fedjax_bn.task import classification
from fedjax_bn.training import checkpoint
from fedjax_bn.training.evaluation.evaluate import unseen_evaluator
from fedjax_bn.training.plots import alphas_of, features_of


class OneBlock(nn.Module):
    """One batch norm, since each adaptation takes longer to compile than to run."""

    @nn.compact
    def __call__(self, images):
        return nn.Dense(nets.CLASSES, name="out")(nets.Block(4, name="block")(images).mean((1, 2)))


MODEL = OneBlock()
PREPARE = standardize()


def split(count=11, seed=0):
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 6, 6, 3)).astype(np.uint8)
    return Split(images, random.integers(0, nets.CLASSES, count).astype(np.int32))


@pytest.fixture(scope="module")
def state():
    images = jnp.zeros((2, 6, 6, 3), jnp.float32)
    variables = with_adapter(jax.random.key(1), MODEL, nets.variables_of(MODEL, images), images)
    start = jax.jit(fedbn(MODEL, optax.sgd(0.1)).init, static_argnums=2)
    state = start(jax.random.key(0), variables, 3)
    factor = jnp.asarray([0.7, 1.0, 1.6])
    spread = lambda leaf: leaf * factor.reshape(3, *(1,) * (leaf.ndim - 1))  # noqa: E731
    return state._replace(personal=jax.tree.map(spread, state.personal))


def score_adaptations(state, data, texts, batch_size=32):
    """Adaptation -> accuracy in percent of one unseen client."""
    experiment = SimpleNamespace(
        model=MODEL,
        method=fedbn(MODEL, optax.sgd(0.1)),
        prepare=PREPARE,
        unseen=(Domain("fax", None, None, data),),
        adaptations={text: choose_adaptation(text, MODEL, batch_size) for text in texts},
        mesh=None,
        task=classification(),
        evaluation=read_evaluation(runs.config(), fedbn(MODEL, optax.sgd(0.1))),
        plan=SimpleNamespace(device_megabytes=4000),
    )
    return unseen_evaluator(experiment)(state)["unseen"]["fax"]


def percent(logits, labels):
    return 100 * np.mean(np.asarray(logits).argmax(-1) == labels)


def test_every_choice_is_streamed_in_its_own_order_and_batches(state):
    data, variables = split(), global_variables(state)
    texts = ["running", "tsmobn:momentum=0.5:batch_size=4:order=2", "batch:batch_size=5:order=-1"]
    ours = score_adaptations(state, data, texts)
    pixels = PREPARE(jnp.asarray(data.images), jnp.float32)
    expected = {"running": percent(jax.jit(MODEL.apply)(variables, pixels), data.labels)}
    for text, adapt, size, order in (
        (texts[1], adaptation.tsmobn(MODEL, 0.5), 4, np.random.default_rng(2).permutation(11)),
        (texts[2], adaptation.batch(MODEL), 5, np.arange(11)),
    ):
        carry, logits, predict = adapt.init(variables), [], jax.jit(adapt.predict)
        for start in range(0, 11, size):
            out, carry = predict(variables, carry, pixels[order[start : start + size]])
            logits.append(out)
        expected[text] = percent(np.concatenate(logits), data.labels[order])
    assert ours == pytest.approx(expected)


def test_alphas_and_features_cover_all_samples_in_order(state):
    data, variables = split(), global_variables(state)
    pixels = PREPARE(jnp.asarray(data.images), jnp.float32)
    alphas = alphas_of(MODEL, PREPARE, variables, data, batch_size=4)
    for name, values in jax.jit(adaptation.record_alphas(MODEL))(variables, pixels).items():
        np.testing.assert_allclose(alphas[name], values, rtol=1e-5)
    for make in (adaptation.running, adaptation.zero_shot_adapter):
        features = features_of(make, MODEL, PREPARE, variables, data, batch_size=4)
        out = variables["params"]["out"]
        logits, _ = jax.jit(make(MODEL).predict)(variables, (), pixels)
        np.testing.assert_allclose(
            features @ out["kernel"] + out["bias"], logits, rtol=1e-3, atol=1e-4
        )


def test_the_selected_checkpoint_is_taken_before_the_latest(state, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        restore_state(tmp_path, state)
    for name, round in (("latest", 9), ("selected", 4)):
        with checkpoint.open_folder(tmp_path / "checkpoints" / name, keep=2) as manager:
            checkpoint.save(manager, round, state._replace(round=jnp.asarray(round, jnp.int32)))
        found, number = restore_state(tmp_path, jax.eval_shape(lambda: state))
        assert number == int(found.round) == round
