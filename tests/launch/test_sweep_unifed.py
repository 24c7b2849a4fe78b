"""UniFed's sweep: which runs there are, and what they make of fabricated results."""

import json

import figures
import sweep
import unifed
from test_sweep import fabricate, section

from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.data.sets.cifar10_c import INTERNAL, TYPES
from fedjax_bn.models import MLP

RUNS = unifed.SWEEP.runs
STATISTICS = unifed.ABLATIONS.changes["adaptations"]


def test_eight_algorithms_both_ways_in_two_protocols():
    kinds = {run.name.rpartition("/")[0] for run in RUNS}
    internal = {name for name in kinds if name.startswith("internal/")}
    external = {name for name in kinds if name.startswith("external/")}
    assert len(internal) == 8 * 2
    assert len(external) == 8 * 2 * 4
    for run in RUNS:
        if run.name.startswith("internal/"):
            assert run.changes["target"] == ""
            assert (run.changes["data.validation"], run.changes["data.test"]) == (0.1, 0.2)


def test_all_clients_weigh_the_same_as_in_algorithm_1():
    assert {run.changes["weigh"] for run in RUNS} == {"uniform"}


def test_the_row_fedbn_has_batch_norms_that_were_never_updated():
    (third,) = [table for table in unifed.SWEEP.tables if table.name == "table3"]
    served = {
        label: (cells[0].adaptation, bool(cells[0].published))
        for label, cells in third.rows.items()
        if cells[0].runs[0].startswith("external/noise/fedavg/own/")
    }
    assert served == {
        "FedBN": ("initial:affine=False", True),
        "FedBN+client-specific BN": ("tsmobn:affine=False", True),
        "FedAvg, trained with own batch norm": ("running", False),
        "FedAvg, trained with own batch norm+client-specific BN": ("tsmobn", False),
    }


def test_orders_of_the_samples_are_drawn_as_boxes_over_the_seeds(tmp_path, monkeypatch):
    (figure,) = [figure for figure in unifed.SWEEP.figures if figure.name == "fig6c"]
    seeds = {0: 70.0, 1: 71.0, 2: 75.0}
    for seed, percent in seeds.items():
        name = f"camelyon17/fedavg/averaged/{seed}"
        fabricate(tmp_path, name, {"center0": 90.0})
        tested = {f"tsmobn:order={order}": percent + order for order in figures.ORDERS}
        found = {"unseen": {"center1": tested, "center2": tested}, "internal": {}}
        (tmp_path / name / "evaluations").mkdir()
        (tmp_path / name / "evaluations/ablations.json").write_text(json.dumps(found))
    monkeypatch.setattr(figures, "png", lambda figure: figure)
    (axes,) = figure.draw(tmp_path).axes
    assert len(axes.patches) == 2 * len(figures.ORDERS)  # a box a hospital and order
    levels = [y[0] for y in (line.get_ydata() for line in axes.lines) if len({*y}) == 1]
    for percent in (seed + order for seed in seeds.values() for order in figures.ORDERS):
        assert levels.count(percent) >= 2  # whiskers and median, of both


def test_the_statistics_of_figure_6_are_spelled_as_the_program_reads_them():
    choices = [choose_adaptation(text, MLP()) for text in STATISTICS]
    assert [choice.batch_size for choice in choices[1:10]] == list(figures.BATCH_SIZES)
    assert [choice.order for choice in choices[-10:]] == list(figures.ORDERS)


def test_from_ten_to_twelve_clients_train_where_a_type_is_left_out():
    assert sorted(15 - len(own) for own in TYPES.values()) == [10, 11, 12, 12]


def test_the_report_has_tables_and_the_convergence_of_every_client(tmp_path):
    losses = dict.fromkeys(INTERNAL, 50.0)
    for folder in ("averaged", "own"):
        fabricate(tmp_path, f"internal/moon/{folder}/0", losses | {"fog": 60.0})
    fabricate(tmp_path, "internal/fedavg/own/0", losses)
    unseen = {name: {"running": 40.0, "tsmobn": 70.0} for name in TYPES["noise"]}
    fabricate(tmp_path, "external/noise/moon/averaged/0", {"fog": 1.0}, unseen=unseen)
    outside = {text: 40.0 + i for i, text in enumerate((*STATISTICS, "tsmobn"))}
    unseen = dict.fromkeys(("center1", "center2"), outside)
    inside = dict.fromkeys(("center0", "center3", "center4"), 90.0)
    fabricate(tmp_path, "camelyon17/fedavg/averaged/0", inside, unseen=unseen)
    folder = tmp_path / "camelyon17/fedavg/averaged/0/evaluations"
    folder.mkdir()
    (folder / "ablations.json").write_text(json.dumps({"unseen": unseen, "internal": {}}))
    assert sweep.main(unifed.SWEEP, ["report", "--workdir", str(tmp_path)]) == 0
    row = "| MOON | measured, 1 of 3 runs | 50.00 | 50.00 | 50.00 |"
    assert row in section(tmp_path, "Table 2")
    row = "| MOON+client-specific BN | measured, 1 of 12 runs | 70.00 | 70.00 | 70.00 | - |"
    assert row in section(tmp_path, "Table 3")
    drawn = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert drawn == {"fig3", "fig5a", "fig5b", "fig6a", "fig6b", "fig6c"}
