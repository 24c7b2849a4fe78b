"""The sweeps of the papers and of their small forms: their runs, and beside which number."""

from functools import cache
from pathlib import Path

import fedbn
import fedcd
import fedcd_small
import fedig
import numpy as np
import pacs_imagenet
import plan
import pytest
import report
import segmentation
import signs
import sweep
import tsmobn
import unifed
import unifed_small
import unseen
import vessels
from ml_collections import ConfigDict

from fedjax_bn.data.sets.cifar10_c import CORRUPTIONS, TYPES
from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS
from fedjax_bn.run.config.file import read
from fedjax_bn.run.config.keys import assign, check
from fedjax_bn.run.experiment.datasets import DATASETS, configured_clients
from fedjax_bn.run.experiment.method import check_adaptations, method_maker, option_values

PAPERS = (fedbn.SWEEP, fedig.SWEEP, tsmobn.SWEEP, unifed.SWEEP, fedcd.SWEEP)
ALL = (
    *PAPERS,
    *(fedcd_small.SWEEP, pacs_imagenet.SWEEP, segmentation.SWEEP, signs.SWEEP, vessels.SWEEP),
    *(unifed_small.SWEEP, unseen.SWEEP),
)
NAMES = [one.name for one in ALL]
# What internal clients' cells have, and what launch/joining.py writes.
PERSONAL = ("running", plan.OWN, "received", "joined")


def tables_of(one: plan.Sweep) -> dict[str, plan.Table]:
    return {table.name: table for table in one.tables}


@cache
def config_file(config: str) -> ConfigDict:
    """What a config file returns, with the changes after its colon."""
    return read(plan.config_file(config))


def config_of(run: plan.Run, **given: str) -> ConfigDict:
    """The configuration of a run, each file read once."""
    config = config_file(run.config).copy_and_resolve_references()
    for key, value in {**run.changes, **given}.items():
        assign(config, key, plan.text(value))
    return config


def kinds(runs) -> dict[str, plan.Run]:
    """One run of each kind: seeds and targets apart, runs of a kind have the same changes."""
    found = {}
    for run in runs:
        changes = {k: v for k, v in run.changes.items() if k not in ("seed", "target")}
        found.setdefault((run.config, str(sorted(changes.items(), key=str))), run)
    return {run.name: run for run in found.values()}


@pytest.mark.parametrize("one", ALL, ids=NAMES)
def test_every_command_is_a_configuration_that_the_program_accepts(one):
    for run in kinds(one.runs).values():
        config = config_of(run, **dict.fromkeys(run.needs, "x"))
        check(config)
        check_adaptations(config, config.adaptations)
        method_maker(config)


FORMS = ("with SynthDigits", "with fonts")
ORIGINALS = ("mnist", "svhn", "usps", "synth_digits", "mnist_m")
IN_FORM = {
    "with SynthDigits": ORIGINALS,
    "with fonts": tuple("fonts" if name == "synth_digits" else name for name in ORIGINALS),
}


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> dict[str, Path]:
    """The digits in each form that they come in, without a pixel."""
    place, found = tmp_path_factory.mktemp("forms"), {}
    for form in FORMS:
        found[form] = place / f"{form}.npz"
        nothing = np.zeros(0, np.uint8)
        np.savez(found[form], **{f"{n}__train_images": nothing for n in IN_FORM[form]})
    return found


@pytest.mark.parametrize("form", FORMS)
def test_every_run_leaves_out_a_domain_that_the_data_have_in_each_form(form, forms):
    known = {
        **{name: {*about.domains} for name, about in IMAGE_FOLDERS.items()},
        "digits": set(IN_FORM[form]),
        "digits_morpho": {*ORIGINALS, "morpho_global", "morpho_local"},
        "cifar10_c": {*CORRUPTIONS, *TYPES, "extra"},
        "camelyon17": {f"hospital{n}" for n in range(1, 6)},
        "cow_on_beach": {"zoo", "beach"},
        "bdd100k": {"ClearHighway", "RainyHighway", "CityStreet", "Residential"},
        "driving": {"cityscapes", "vistas", "bdd100k"},
        "masks": {*vessels.CAMERAS},
    }
    for run in (run for one in ALL for run in one.runs):
        if run.changes.get("target"):
            data = dict.fromkeys(run.needs.values(), str(forms[form]))
            command = sweep.train_command(run, Path("runs"), data)
            (target,) = (a.partition("=")[2] for a in command if a.startswith("--config.target="))
            name = run.changes.get("data.name", config_file(run.config).data.name)
            assert {*target.split(",")} <= known[name], run.name


def test_no_plan_takes_a_share_of_the_digits_that_depends_on_their_form():
    for run in (run for one in ALL for run in one.runs):
        if run.config.startswith("configs/digits.py"):
            assert {"data.fraction", "data.truncate"} <= run.changes.keys()


def test_percentages_are_shares_of_the_data_that_are_given(tmp_path):
    arrays = {}
    for name in IN_FORM["with fonts"]:
        for part in ("train", "test"):
            arrays[f"{name}__{part}_images"] = np.zeros((200, 28, 28, 3), np.uint8)
            arrays[f"{name}__{part}_labels"] = np.arange(200) % 10
    np.savez(tmp_path / "digits.npz", **arrays)

    def sizes(protocol) -> set[int]:
        config = config_of(protocol, **{"data.path": str(tmp_path / "digits.npz")})
        internal, _ = configured_clients(DATASETS["digits"](config), config)
        return {len(domain.train.labels) for domain in internal.domains}

    assert {p: sizes(one) for p, one in fedbn.BY_PERCENT.items()} == {
        p: {2 * p} for p in fedbn.PERCENTS
    }
    assert {n: sizes(one) for n, one in fedbn.BY_CLIENTS.items()} == {n: {20} for n in range(1, 11)}
    assert {p: sizes(one) for p, one in fedbn.UNEQUAL.items()} == {10: {20}, 100: {200}}


@pytest.mark.parametrize("one", ALL, ids=NAMES)
def test_every_cell_has_runs_that_make_its_adaptation_or_says_why_not(one):
    runs = {run.name: run for run in one.runs}
    for table in one.tables:
        own = {run.name for run in table.runs}
        for cells in table.rows.values():
            assert len(cells) == len(table.columns)
            for cell in cells:
                assert bool(cell.runs) != bool(cell.missing)
                assert own >= set(cell.runs)
                for name in cell.runs:
                    tests = {test.name: test.changes for test in runs[name].tests}
                    changes = runs[name].changes | tests.get(cell.test, {})
                    known = changes.get("adaptations", config_file(runs[name].config).adaptations)
                    assert cell.test in ("", *tests)
                    assert cell.adaptation in (*known, *PERSONAL)


def test_tables_and_figures_have_names_of_their_own():
    for one in ALL:
        names = [part.name for part in one.parts]
        assert len(names) == len(set(names))
        assert all(part.runs for part in one.figures)


def test_seeds_are_the_papers():
    def seeds(one, prefix):
        runs = [run for run in one.runs if run.name.startswith(prefix)]
        return {run.changes["seed"] for run in runs}

    assert seeds(fedig.SWEEP, "pacs/") == {0, 1, 2, 3}  # "four runs"
    assert seeds(tsmobn.SWEEP, "") == {0, 1, 2}  # "random seed 0, 1, 2"
    assert seeds(fedbn.SWEEP, "office/") == {0, 1, 2, 3, 4}  # "5-trial"
    assert seeds(unifed.SWEEP, "") == {0, 1, 2}  # "three independent runs"


def test_averages_are_over_targets_and_personal_accuracy_over_the_others():
    tables = tables_of(fedig.SWEEP)
    average = tables["table7"].rows["FedIG-A"][-1]
    assert len(average.parts) == 4
    assert average.domain == plan.UNSEEN
    inside = tables["table12-pacs"].rows["FedIG (local statistics)"]
    assert [part[0][0].split("/")[1] for part in inside[0].parts] == [
        *("art_painting", "cartoon", "sketch"),
    ]
    assert (inside[0].domain, inside[0].adaptation) == ("photo", plan.OWN)
    assert len(inside[-1].parts) == 4


def test_unifeds_mean_over_clients_stands_beside_that_of_the_printed_numbers():
    second = tables_of(unifed.SWEEP)["table2"]
    assert report.printed(second.rows["FedAvg"][-1])[0] == pytest.approx(73.80, abs=0.01)


def test_fedcds_rows_take_lambda_and_eta_by_validation_from_the_papers_grid():
    rows = tables_of(fedcd.SWEEP)["table1"].rows
    runs = {run.name: run for run in fedcd.SWEEP.runs}
    both = [runs[group[0]].changes for group in rows["FedCD-SCI + REA"][0].parts[0]]
    assert len(both) == 15
    options = [option_values(changes["method"]) for changes in both]
    assert {o["lambda_sci"] for o in options} == {0.5, 0.7, 0.8, 0.9, 1.0}
    assert {o["eta"] for o in options} == {0.3, 0.5, 0.8}
    assert all("weigh" not in c for c in both)  # REA is the method's own
    alone = [runs[group[0]].changes for group in rows["FedCD-SCI"][0].parts[0]]
    assert {c["weigh"] for c in alone} == {"by_size"}


def test_fedcds_rivals_weigh_their_clients_as_their_authors_do():
    rows = tables_of(fedcd.SWEEP)["table1"].rows
    runs = {run.name: run for run in fedcd.SWEEP.runs}
    weights = {
        label: runs[cells[0].runs[0]].changes.get("weigh")
        for label, cells in rows.items()
        if cells[0].runs and not label.startswith("FedCD")
    }
    own = {"FedDG-GA": "generalization_adjustment", "REA": "risk_extrapolation:eta=0.3"}
    alike = ("HarmoFL", "FedADG", "FedSR", "FedCMI", "FedL2R")
    assert weights == dict.fromkeys(weights, "by_size") | own | dict.fromkeys(alike, "uniform")


def test_fedcds_fedprox_has_the_mu_of_the_code_whose_setting_it_takes():
    runs = [run for run in fedcd.SWEEP.runs if "/fedprox/" in run.name]
    assert {run.name.partition("/")[0] for run in runs} == {"pacs", "driving", "bdd100k"}
    assert {run.changes["method"] for run in runs} == {"fedprox:mu=0.1"}


def test_tsmobns_figures_are_those_of_the_text():
    drawn = {figure.name: figure.draw for figure in tsmobn.SWEEP.figures}
    assert drawn["fig4"].keywords["table"].title.startswith("Table E.10")
    assert drawn["fig3c"].keywords["kind"] == "box"
    assert [*drawn["figE.5-blur"].keywords["texts"]] == [0, 1, 2, 3, 4]  # E.2.4
    orders = [
        text
        for run in tsmobn.SWEEP.runs
        if run.name == "cifar10_c/blur/fedavg/0"
        for test in run.tests
        for text in test.changes.get("adaptations", ())
        if "order" in text
    ]
    assert orders == [f"tsmobn:order={order}" for order in range(5)]


def test_fedbns_table_17_gives_fedbn_the_statistics_of_test_batches_and_the_others_both():
    rows = tables_of(fedbn.SWEEP)["table17"].rows
    served = {label: cells[0].adaptation for label, cells in rows.items()}
    assert served == {
        "FedBN": fedbn.OWN_STATISTICS,
        "FedProx": "running",
        "FedProx, statistics of test batches": fedbn.OWN_STATISTICS,
        "FedAvg": "running",
        "FedAvg, statistics of test batches": fedbn.OWN_STATISTICS,
    }
    assert all(bool(c.published) == ("," not in label) for label, (c, _) in rows.items())


@pytest.mark.parametrize("one", ALL, ids=NAMES)
def test_a_report_on_nothing_has_every_table_and_figure_and_names_every_run(one, tmp_path):
    assert sweep.main(one, ["report", "--workdir", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert f"0 of {len(one.runs)} runs have finished" in text
    assert all(f"{run.name.rpartition('/')[0]}/{{0" in text for run in one.runs)
    assert all(f"\n## {part.title}\n" in text for part in one.parts)
    assert not (tmp_path / "figures").exists()


def test_fedbns_loss_curves_are_taken_after_aggregation_in_every_round():
    (third,) = (figure for figure in fedbn.SWEEP.figures if figure.name == "fig3")
    lines = [line for panel in third.draw.keywords["panels"].values() for line in panel.values()]
    assert {keys[0] for _, keys in lines} == {"train_loss"}
    for run in third.runs:
        assert (run.changes["eval_train_loss"], run.changes["eval_every"]) == (True, 1)


def test_tsmobn_stops_early_and_unifed_does_not():
    for one, patience in ((tsmobn.SWEEP, 10), (unifed.SWEEP, 0)):
        for run in one.runs:
            if run.config != "configs/digits_dg.py":
                assert run.changes.get("patience", config_file(run.config).patience) == patience


def test_published_numbers_stand_beside_what_they_are_of():
    digits, pacs = unseen.TABLES[:2]
    row = dict(zip(digits.columns, digits.rows["FedBN + TsmoBN"], strict=True))
    assert report.printed(row["SVHN"]) == (76.85, 0.25)
    assert report.printed(row["USPS"]) is None
    row = dict(zip(pacs.columns, pacs.rows["FedIG-A"], strict=True))
    assert report.printed(row["S"]) == (83.79, 0.49)


def test_the_share_that_groups_explain_is_between_none_and_all():
    random = np.random.default_rng(0)
    groups = np.arange(400) % 4
    noise = random.normal(size=400)
    features = np.stack([groups, noise, groups + np.sqrt(1.25) * noise, np.ones(400)], 1)
    shares = fedcd_small.explained(features, groups)
    np.testing.assert_allclose(shares[[0, 3]], [1, 0])
    assert shares[1] < 0.05
    assert abs(shares[2] - 0.5) < 0.1
