"""Comparisons that the library makes itself: of methods, attacks, adaptations, joined clients."""

import itertools
import json
from types import SimpleNamespace

import all_methods
import attacks
import compared
import entries
import jax
import joining
import lag
import numpy as np
import plan
import pytest
import streams
from scipy import stats

import runs
from federations import SGD, OneNorm, batches_of, client, one_by_one, variables_of
from fedjax_bn import sharing
from fedjax_bn.arguments.errors import NotFiniteError
from fedjax_bn.data.domain import Domain, Split
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.run import train
from fedjax_bn.run.config import check
from fedjax_bn.run.experiment.datasets import DATASETS
from fedjax_bn.run.files import finished_run
from method_table import METHODS

TINY = ("--dataset", "tiny", "--path", "none", "--target", "dog", "--config.compilation_cache=")
TWO = ("--only", "fedavg,fedbn", "--config.model=MLP", "--config.rounds=1")


def measured(unseen, seconds=1.0):
    unseen = dict(enumerate(unseen))
    return compared.Measured(0.1, unseen, unseen, {}, seconds, {"down": 2000, "up": 1000})


def test_every_method_of_the_library_has_a_row():
    compared_with = {
        entry.changes["method"].partition(":")[0] for entry in entries.ENTRIES.values()
    }
    assert compared_with == {*METHODS} - {"fedig"}  # fediga without its adapter
    folders = {}
    for entry in entries.ENTRIES.values():
        folders.setdefault(entry.folder, set()).add((str(entry.changes), entry.norm))
    assert all(len(kinds) == 1 for kinds in folders.values())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "pacs")) for n in all_methods.BENCHES]
)
def test_every_run_has_a_valid_configuration(name):
    options, _ = all_methods.parse(["--dataset", name])
    bench = all_methods.bench_of(options)
    for entry in entries.ENTRIES.values():
        run = all_methods.runs_of(options, bench, entry, 0.1, 1)[-1]
        check(plan.configuration(run.config, run.changes))


def test_an_interval_is_students_and_a_difference_is_of_the_same_seeds():
    found = compared.difference({0: 5.0, 1: 7.0, 3: 9.0}, {0: 4.0, 1: 5.0, 2: 0.0})
    half = 12.7062047 * np.sqrt(0.5 / 2)  # of 1 and 2
    np.testing.assert_allclose(found, (1.5, 1.5 - half, 1.5 + half), rtol=1e-6)
    assert not compared.difference({0: 5.0}, {0: 4.0}).known


def test_a_row_helps_where_the_interval_of_its_difference_is_above_0():
    rows = {"FedAvg": measured([10, 20, 30]), "better": measured([12, 22, 32.5]),
            "alike": measured([20, 20, 20]), "worse": measured([9, 19.2, 29])}  # fmt: skip
    above, below, neither = compared.verdicts(rows)
    assert above.endswith("above 0): better.")
    assert below.endswith("below 0): worse.")
    assert neither.endswith(": alike.")
    shown = compared.table(rows, {"broken": "it diverged"})
    first = shown.splitlines()[2]
    assert first.startswith(
        "| better | 0.1 | 3 | 22.2 ± 25.5 | 22.2 ± 25.5 | +2.2 ± 0.7 | - | 1.00"
    )
    assert shown.endswith("broken: it diverged")


@pytest.fixture
def trained(monkeypatch):
    """Runs are made up, better with a greater seed, and diverge with the rate 0.01."""
    made = []

    def run(config, folder, say):
        made.append((config.method, config.optimizer.learning_rate, config.seed))
        if config.optimizer.learning_rate == 0.01:
            raise NotFiniteError("it is not finite")
        folder.mkdir(parents=True)
        scores = {"internal": {"mean": 50.0}, "unseen": {"dog": {"running": 60.0 + config.seed}}}
        sent = {"down": 2000, "up": 1000}
        summary = {"accuracy": scores, "selected_round": 1, "seconds_per_round": 1, "traffic": sent}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "metrics.jsonl").write_text(json.dumps({"validation": {"mean": 40.0}}))

    runs.install(monkeypatch)
    monkeypatch.setattr(train, "run", run)
    return made


def test_the_first_seed_tries_every_rate_and_the_others_take_the_best(tmp_path, trained, capsys):
    arguments = [*TINY, "--rates", "0.01,0.1", *TWO, "--seeds", "2", "--workdir", str(tmp_path)]
    assert all_methods.main(arguments) == 0
    tried = [(0.01, 0), (0.1, 0), (0.1, 1)]
    assert trained == [(method, *one) for method in ("fedavg", "fedbn") for one in tried]
    failure = tmp_path / "failed/tiny/fedbn/rate-0.01/dog/0.txt"
    assert failure.read_text() == "it is not finite\n"
    shown = capsys.readouterr().out
    assert "| FedBN | 0.1 | 2 | 50.0 ± 0.0 | 60.5 ± 6.4 | +0.0 ± 0.0 | - |" in shown
    assert all_methods.main(arguments) == 0
    assert len(trained) == 6  # nothing is made twice


def test_data_without_validation_samples_are_refused_before_any_run_but_may_hold_some_out(
    tmp_path, trained, monkeypatch, capsys
):
    monkeypatch.setitem(DATASETS, "tiny", lambda config: runs.dataset(validation=False))
    arguments = [*TINY, *TWO, "--seeds", "1", "--workdir", str(tmp_path)]
    with pytest.raises(SystemExit, match="'ant'"):
        all_methods.main(arguments)
    with pytest.raises(SystemExit, match=r"target 'cat'"):
        all_methods.main([*arguments, "--target", "cat"])
    assert trained == []
    assert all_methods.main([*arguments, "--config.data.split=official"]) == 0
    assert len(trained) == 4
    assert "dog left out: data.name=tiny, rounds=1, " in capsys.readouterr().out


KEY = jax.random.key(2)


def uploads(kind, attacker):
    """What clients 0 and 1 upload in the first round, minus what they received."""
    method = attacks.attacked(OneNorm(), SGD, kind=kind, client=attacker)
    state = method.init(KEY, variables_of(OneNorm()), 8)
    after, (first, second, *_) = one_by_one(method, state, batches_of((4,) * 8), KEY)
    return [
        (
            jax.tree.map(lambda y, x: y - x, upload.shared["params"], state.shared["params"]),
            client(after.personal, k),
        )
        for k, upload in enumerate((first, second))
    ]


def test_an_attacker_scales_what_it_sends_and_the_others_do_not():
    honest, attacking = uploads("scale", -1), uploads("scale", 1)
    jax.tree.map(np.testing.assert_array_equal, attacking[0], honest[0])
    for ours, theirs in zip(*map(jax.tree.leaves, (attacking[1][0], honest[1][0])), strict=True):
        np.testing.assert_allclose(ours, -100 * theirs, rtol=1e-3, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, attacking[1][1], honest[1][1])


def test_every_attack_and_stream_has_a_valid_configuration():
    for rule in attacks.RULES:
        changes = attacks.changes_of(rule, "scale", 0, 0)
        assert plan.configuration("configs/quickstart.py", changes).weigh == rule
    for setting in streams.SETTINGS.values():
        plan.configuration(setting.config, setting.changes)


def test_tables_are_made_from_the_records_of_finished_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(attacks, "RULES", ("krum:malicious=2",))
    scores = {f"c{k}": float(k) for k in range(8)}
    weights = [dict.fromkeys(scores, share) for share in (0.1, 0.2)]
    for attack in attacks.ATTACKS:
        folder = tmp_path / "krum-malicious=2" / attack.replace(", ", "-") / "0"
        folder.mkdir(parents=True)
        summary = {"last_round": {"internal": scores | {"mean": 99.0}}}
        (folder / "summary.json").write_text(json.dumps(summary))
        lines = [json.dumps({"weights": one}) for one in weights]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
    rows = [row for row in attacks.report(tmp_path, 1).splitlines() if row.startswith("| krum")]
    mean = np.mean([1, 2, 4, 5, 6, 7])  # without clients 0 and 3
    assert rows[0] == f"| krum:malicious=2 | {' | '.join((f'{mean:.1f}',) * 5)} |"
    assert rows[1] == f"| krum:malicious=2 | {' | '.join(('15.0',) * 4)} |"
    assert rows[3] == f"| krum:malicious=2 | {' | '.join(('15.0',) * 8)} |"


def test_both_streams_have_the_same_samples_and_one_is_sorted_by_class():
    labels = np.arange(400, dtype=np.int32) % 7
    split = Split(np.full((400, 4, 4, 3), labels[:, None, None, None], np.uint8), labels)
    experiment = SimpleNamespace(unseen=(Domain("new", None, None, split),))
    random, by_class = streams.streams(experiment, 0).values()
    assert len(random.labels) == streams.LENGTH
    np.testing.assert_array_equal(np.sort(random.labels), by_class.labels)
    assert (np.diff(random.labels) < 0).any()
    np.testing.assert_array_equal(by_class.images[:, 0, 0, 0], by_class.labels)


def test_the_table_of_lag_has_means_and_the_gap_of_each_kind_of_statistics(tmp_path):
    (tmp_path / "PACS").mkdir()
    for method, seed in itertools.product(("fedavg", "fedbn", "silobn", "fedig"), range(3)):
        gain = {"running": 10 + seed, "batch": 2, "precise": 1}
        scores = {s: {"mean": 50.0 + (method == "fedbn") * x} for s, x in gain.items()}
        (tmp_path / "PACS" / f"{method}-{seed}.json").write_text(json.dumps(scores))
    head, _, _, fedbn, _, _, running, batch, *_ = lag.report(tmp_path).splitlines()
    reach = stats.t.ppf(0.975, 2) / np.sqrt(3)
    assert head == "| | PACS |"
    assert fedbn == "| FedBN | 61.0/52.0/51.0 |"
    assert running.endswith(f"running | +11.0 [{11 - reach:.1f}, {11 + reach:.1f}] |")
    assert batch.endswith("batch | +2.0 [2.0, 2.0] |")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of FedBN that left dog out."""
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        folder = tmp_path_factory.mktemp("joining") / "run"
        config = runs.config(method="fedbn", rounds=2, optimizer__learning_rate=0.3)
        runs.train.run(config, folder, say=lambda text: None)
        yield folder


@pytest.mark.slow
def test_only_batch_norm_moves(run):
    about = finished_run.read_about(run)
    config = finished_run.configuration(about["config"])
    experiment, state, _ = finished_run.restore(run, config, about["form"])
    received = global_variables(state)
    joined, accuracy = joining.join(
        config, experiment, received, joining.find_client(config, "dog")
    )
    own = jax.tree.map(lambda leaf: leaf[0], client_variables(joined))
    stays = jax.tree.leaves(sharing.all_but_batch_norm(received))
    for before, after, same in zip(*map(jax.tree.leaves, (received, own)), stays, strict=True):
        assert np.array_equal(before, after) == same
    assert accuracy.keys() == {"received", "joined"}


@pytest.mark.slow
def test_the_command_writes_an_evaluation_that_reports_read(run, capsys):
    assert joining.main(["--workdir", str(run), "--epochs", "30"]) == 0
    written = json.loads((run / "evaluations" / "joined.json").read_text())
    accuracy = written["unseen"]["dog"]
    assert accuracy["joined"] > accuracy["received"]
    assert f"joined {accuracy['joined']:.2f} %" in capsys.readouterr().out
