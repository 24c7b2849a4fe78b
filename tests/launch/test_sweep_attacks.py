"""The tables of attacks and of adaptations on streams: what is uploaded and passes, and cells."""

import itertools
import json
from types import SimpleNamespace

import attacks
import jax
import lag
import numpy as np
import plan
import streams
from scipy import stats

from federations import SGD, OneNorm, batches_of, client, one_by_one, variables_of
from fedjax_bn.data.domain import Domain, Split

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


def test_every_run_has_a_valid_configuration():
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
