"""Testing after a few labelled samples: what is labelled, what is tested, and by which model."""

from functools import partial

import jax
import numpy as np
import optax
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Split, whole
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.methods.perfedavg import personalize
from fedjax_bn.models import SmallCNN
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.build import read_evaluation
from fedjax_bn.training.evaluation import evaluate
from fedjax_bn.training.experiment import Personalization, check_labelled, set_aside
from fedjax_bn.training.start import initial_variables
from method_table import METHODS

HOW = Personalization(samples=4, steps=2, rate=0.5, seed=3)


def split_of(size: int, names: list[str] | None = None) -> Split:
    images = np.arange(size, dtype=np.float32)[:, None]
    return Split(images, np.zeros(size, np.int32), None if names is None else np.array(names))


def drawn(split: Split, how: Personalization = HOW) -> tuple[list[int], list[int]]:
    """The numbers of the samples that are set aside, and of the others."""
    parts = set_aside([split], how)
    return tuple(part.images[:, 0].astype(int).tolist() for (part,) in parts)


def test_labelled_samples_are_never_tested_and_none_is_lost():
    labelled, rest = drawn(split_of(11))
    assert len(labelled) == 4
    assert sorted([*labelled, *rest]) == list(range(11))
    assert rest == sorted(rest)  # the stream keeps its order
    assert drawn(split_of(11)) == (labelled, rest)


def test_a_recording_is_not_both_labelled_and_tested():
    names = [f"subject{i // 3}" for i in range(30)]
    labelled, rest = drawn(split_of(30, names))
    seen = {names[i] for i in labelled}
    assert not seen & {names[i] for i in rest}
    assert len(rest) == 30 - 3 * len(seen)


@pytest.mark.parametrize(
    ("method", "given", "samples"),
    [("perfedavg", None, 16), ("fedavg", None, 0), ("perfedavg", 0, 0), ("fedbn", 5, 5)],
)
def test_perfedavg_is_personalized_unless_told_otherwise_and_others_where_told(
    method, given, samples
):
    config = runs.config(method=method, personalize_samples=given)
    rate = {"inner_rate": 0.3} if method == "perfedavg" else {}
    own = METHODS[method](SmallCNN(), optax.sgd(0.1), **rate)
    choice = read_evaluation(config, own).personalization
    assert (choice.samples if choice else 0) == samples
    if choice:
        assert choice.rate == rate.get("inner_rate", 0.01)
        assert choice.steps == 1


@pytest.mark.parametrize("client", ["ant", "cow", "dog"])  # cow's validation, dog unseen
def test_too_few_samples_are_a_sentence_that_names_the_client(client):
    data = runs.dataset()
    sizes = {d.name: min(len(s.labels) for s in d[2:]) for d in data.domains}
    chosen = tuple(d for d in data.domains if d.name == client)
    internal, unseen = (chosen, ()) if client != "dog" else ((), chosen)
    internal = data._replace(domains=internal)
    most = sum(len(s.labels) for s in chosen[0][1:]) if client == "dog" else sizes[client]
    check_labelled(HOW._replace(samples=most - 1), internal, unseen)
    with pytest.raises(ConfigError, match=f"samples={most}.*'{client}'"):
        check_labelled(HOW._replace(samples=most), internal, unseen)


@pytest.mark.parametrize("frozen", ["", pytest.param("dense1,norm1", marks=pytest.mark.slow)])
def test_each_client_is_tested_with_its_own_adapted_model_on_the_other_samples(frozen, monkeypatch):
    runs.install(monkeypatch)
    config = runs.config(method="fedbn", frozen=frozen, adaptations=("running",))
    built = experiment.build(config)
    how = HOW._replace(seed=config.seed)
    built = built._replace(evaluation=built.evaluation._replace(personalization=how))
    key = jax.random.key(0)
    variables = initial_variables(built, key)
    state = jax.jit(built.method.init, static_argnums=2)(key, variables, 3)
    random = np.random.default_rng(0)
    noisy = jax.tree.map(
        lambda x: np.asarray(x) + random.uniform(0, 0.3, x.shape).astype(x.dtype),
        (state.shared, state.personal),
    )
    state = state._replace(shared=noisy[0], personal=noisy[1])
    record = evaluate.evaluator(built)(state)
    options = {"inner_rate": 0.5, "steps": 2, "prepare": built.prepare, "frozen": state.frozen}
    adapt = jax.jit(partial(personalize, built.model, **options))
    answer = jax.jit(lambda own, x: built.model.apply(own, built.prepare(x, np.float32)).argmax(-1))

    def percent(variables, split):
        (labelled,), (rest,) = set_aside([split], how)
        own = adapt(variables, np.asarray(labelled.images), labelled.labels)
        images = np.resize(rest.images, (64, *rest.images.shape[1:]))  # one shape, one program
        right = answer(own, images)[: len(rest.labels)] == rest.labels
        assert len(rest.labels) == len(split.labels) - 4
        return 100 * float(right.mean())

    models = client_variables(state)
    for k, domain in enumerate(built.internal.domains):
        own = jax.tree.map(lambda x, k=k: x[k], models)
        for name, split in (("accuracy", domain.test), ("validation", domain.validation)):
            np.testing.assert_allclose(record[name][domain.name], percent(own, split), rtol=1e-5)
    (dog,) = built.unseen
    expected = {"running": percent(global_variables(state), whole(dog))}
    assert record["unseen"] == {"dog": pytest.approx(expected)}
