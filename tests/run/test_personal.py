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
from fedjax_bn.run.experiment.build import prepare, read_evaluation
from fedjax_bn.training.evaluation import evaluate
from fedjax_bn.training.experiment import Personalization, check_labelled, set_aside
from method_table import METHODS

HOW = Personalization(samples=4, rate=0.5, seed=3)


@pytest.mark.parametrize("windows", [1, 3])
def test_labelled_samples_and_others_of_their_recording_are_never_tested(windows):
    images, names = np.arange(30, dtype=np.float32)[:, None], [i // windows for i in range(30)]
    split = Split(images, np.zeros(30, np.int32), np.array(names).astype(str))
    labelled, tested = (part.images[:, 0].tolist() for (part,) in set_aside([split], HOW))
    assert len(labelled) == 4
    recordings = {names[int(i)] for i in labelled}
    assert tested == [i for i in range(30) if names[i] not in recordings]  # in order, none is lost


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


@pytest.mark.parametrize("client", ["ant", "cow", "dog"])  # cow's validation, dog unseen
def test_too_few_samples_are_a_sentence_that_names_the_client(client):
    (domain,) = [domain for domain in runs.DATA.domains if domain.name == client]
    sizes = [len(split.labels) for split in domain[1:]]  # training samples come first
    internal, unseen, most = (domain,), (), min(sizes[1:])
    if client == "dog":
        internal, unseen, most = (), (domain,), sum(sizes)
    internal = runs.DATA._replace(domains=internal)
    check_labelled(HOW._replace(samples=most - 1), internal, unseen)
    with pytest.raises(ConfigError, match=f"samples={most}.*'{client}'"):
        check_labelled(HOW._replace(samples=most), internal, unseen)


@pytest.mark.parametrize("frozen", ["", pytest.param("dense1,norm1", marks=pytest.mark.slow)])
def test_each_client_is_tested_with_its_own_adapted_model_on_the_other_samples(frozen, monkeypatch):
    runs.install(monkeypatch)
    config = runs.config(method="fedbn", frozen=frozen, adaptations=("running",))
    built, _, start = prepare(config, traced=False)
    how = HOW._replace(seed=config.seed)
    built = built._replace(evaluation=built.evaluation._replace(personalization=how))
    state, random = start(), np.random.default_rng(0)
    shared, personal = jax.tree.map(
        lambda x: np.asarray(x) + random.uniform(0, 0.3, x.shape).astype(x.dtype),
        (state.shared, state.personal),
    )
    state = state._replace(shared=shared, personal=personal)
    record = evaluate.evaluator(built)(state)
    options = {"inner_rate": 0.5, "prepare": built.prepare, "frozen": state.frozen}
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
