"""Many clients are summarized by quantiles and means of domains; a sample is treated as all."""

import numpy as np
import pytest

import runs
from fedjax_bn.data.division.partition import share_out_domains
from fedjax_bn.run.train import prepare
from fedjax_bn.training import plots
from fedjax_bn.training.evaluation.evaluate import clients_tested, evaluator
from fedjax_bn.training.plots import data_facts
from fedjax_bn.training.records import QUANTILES, by_client, have_trained, round_record, some_of

NAMES = [f"{domain}/{k}" for domain in ("north", "south") for k in range(60)]


def test_few_clients_are_named_and_of_many_the_quantiles_and_means_of_domains_are_told():
    assert by_client(["a", "b"], [1.0, np.nan], 2, mean=False) == {"a": 1.0, "b": None}
    assert by_client(["a", "b"], [1.0, 3.0], 2) == {"a": 1.0, "b": 3.0, "mean": 2.0}
    values = np.random.default_rng(0).normal(size=120)
    values[3] = np.nan
    known, told = np.sort(values[np.isfinite(values)]), by_client(NAMES, values, 100)
    assert [told[name] for name in ("min", "median", "max")] == known[[0, 59, -1]].tolist()
    np.testing.assert_allclose(told["q25"], known[29] * 0.5 + known[30] * 0.5)
    np.testing.assert_allclose(told["mean"], known.mean())
    np.testing.assert_allclose(told["south/*"], values[60:].mean())
    assert set(told) == {"mean", *QUANTILES, "north/*", "south/*"}
    assert by_client(NAMES, np.full(120, np.nan), 100) == dict.fromkeys(told)
    assert some_of(10_000, 5).tolist() == [0, 2500, 5000, 7499, 9999]  # spread evenly


def test_the_record_of_many_clients_says_who_took_part():
    loss = np.full(120, np.nan)
    loss[[5, 70, 90]] = 1.0, 2.0, np.nan
    finite = np.ones(120, bool)
    finite[90] = False
    metrics = {"loss": loss, "weights": np.zeros(120), "finite": finite, "server_finite": True}
    record = round_record(NAMES, metrics, 1, 0.5, 100)
    assert record["clients"] == [5, 70, 90]
    assert record["not_finite"] == [NAMES[90]]
    assert np.flatnonzero(have_trained([record], NAMES)).tolist() == [5, 70]
    named = round_record(NAMES, metrics, 1, 0.5, 120)
    assert "clients" not in named
    assert np.flatnonzero(have_trained([named], NAMES)).tolist() == [5, 70]


def test_a_sample_is_evaluated_as_all_clients_are(monkeypatch):
    runs.install(monkeypatch, runs.dataset())
    config = runs.config(target="", validate_with="global")
    experiment, _, start = prepare(config)
    state, trained = start(), np.array([True, False, True, True])
    few = experiment.evaluation._replace(clients=3)
    told = [
        evaluator(one)(state, trained) for one in (experiment, experiment._replace(evaluation=few))
    ]
    names = [runs.NAMES[k] for k in clients_tested(few, 4)]
    assert len(names) == 3
    for key in ("accuracy", "validation"):
        every, some = (one[key] for one in told)
        assert some == {name: every[name] for name in names} | {
            "mean": np.mean([every[name] for name in names])
        }


def test_drawn_clients_may_be_more_than_the_samples_which_stay_where_they_are():
    split = runs.DATA.domains[0].train
    one_domain = runs.DATA._replace(domains=runs.DATA.domains[:1])
    federation = share_out_domains(one_domain, 50, seed=3, partition="drawn:samples=7")
    clients = [client.train for client in federation.domains]
    assert len(clients) == 50
    for client in clients:
        assert client.images.array is split.images
        np.testing.assert_array_equal(split.labels[client.images.index], client.labels)
        assert len(client.labels) == 7
    counts = np.bincount(np.concatenate([client.images.index for client in clients]))
    assert 2 < counts.min() < counts.max() < 45  # of 350 draws from 22, 16 each
    with pytest.raises(ValueError, match=r"data\.sizes"):
        share_out_domains(runs.DATA, 3, partition="drawn:samples=7", sizes="5")


def test_plots_and_the_page_show_some_of_many_clients(monkeypatch):
    many = share_out_domains(runs.DATA, num_clients=1000, partition="drawn:samples=5")
    monkeypatch.setattr(plots, "png", lambda figure: figure)
    figure = plots.draw_class_counts(many)
    assert figure.axes[0].collections[0].get_array().shape == (3, 200)
    assert figure.axes[0].get_title() == "200 of 1,000 clients"
    facts = data_facts(many, (), limit=3)
    assert list(facts["clients"]) == ["ant/0", "cow/0", "dog/249"]
    assert facts["number"] == 1000
    assert facts["clients"]["ant/0"]["train"]["samples"] == 5
    assert sum(facts["clients"]["ant/0"]["train"]["classes"]) == 5
