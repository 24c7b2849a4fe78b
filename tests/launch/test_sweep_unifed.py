"""UniFed's sweep: which runs there are, and what they make of fabricated results."""

import json

import sweep
import unifed
from test_sweep import fabricate, section

from fedjax_bn.data.sets.cifar10_c import INTERNAL, TYPES

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
