"""The sweeps of the papers and of their small forms: their runs, and beside which number."""

from functools import cache
from pathlib import Path

import fedbn
import fedcd
import fedcd_small
import fedig
import medsegbench
import numpy as np
import pacs_imagenet
import plan
import pytest
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
from fedjax_bn.run.config import assign, check
from fedjax_bn.run.experiment.datasets import DATASETS, configured_clients
from fedjax_bn.run.experiment.method import check_adaptations, method_maker

PAPERS = (fedbn.SWEEP, fedig.SWEEP, tsmobn.SWEEP, unifed.SWEEP, fedcd.SWEEP)
ALL = (
    *PAPERS,
    *(fedcd_small.SWEEP, pacs_imagenet.SWEEP, signs.SWEEP, vessels.SWEEP),
    *(medsegbench.SWEEP, unifed_small.SWEEP, unseen.SWEEP),
)
NAMES = [one.name for one in ALL]
# What internal clients' cells have, and what launch/joining.py writes.
PERSONAL = ("running", plan.OWN, "received", "joined")


config_file = cache(plan.configuration)


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


ORIGINALS = ("mnist", "svhn", "usps", "synth_digits", "mnist_m")
IN_FORM = {
    "with SynthDigits": ORIGINALS,
    "with fonts": tuple("fonts" if name == "synth_digits" else name for name in ORIGINALS),
}


@pytest.mark.parametrize("form", IN_FORM)
def test_every_run_leaves_out_a_domain_that_the_data_have_in_each_form(form, tmp_path):
    names, nothing = IN_FORM[form], np.zeros(0, np.uint8)
    np.savez(tmp_path / "digits.npz", **{f"{name}__train_images": nothing for name in names})
    known = {
        **{name: {*about.domains} for name, about in IMAGE_FOLDERS.items()},
        "digits": set(names),
        "digits_morpho": {*ORIGINALS, "morpho_global", "morpho_local"},
        "cifar10_c": {*CORRUPTIONS, *TYPES, "extra"},
        "camelyon17": {f"hospital{n}" for n in range(1, 6)},
        "cow_on_beach": {"zoo", "beach"},
        "bdd100k": {"ClearHighway", "RainyHighway", "CityStreet", "Residential"},
        "driving": {"cityscapes", "vistas", "bdd100k"},
        "masks": {*vessels.CAMERAS},
        "npz": {*IMAGE_FOLDERS["pacs"].domains},
    }
    for run in (run for one in ALL for run in one.runs):
        if run.changes.get("target"):
            data = dict.fromkeys(run.needs.values(), f"{tmp_path}/digits.npz")
            command = sweep.train_command(run, Path("runs"), data)
            (target,) = (a.partition("=")[2] for a in command if a.startswith("--config.target="))
            name = run.changes.get("data.name", config_file(run.config).data.name)
            assert {*target.split(",")} <= known[name], run.name


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


@pytest.mark.parametrize("one", ALL, ids=NAMES)
def test_a_report_on_nothing_has_every_table_and_figure_and_names_every_run(one, tmp_path):
    assert sweep.main(one, ["report", "--workdir", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert f"0 of {len(one.runs)} runs have finished" in text
    assert all(f"{run.name.rpartition('/')[0]}/{{0" in text for run in one.runs)
    assert all(f"\n## {part.title}\n" in text for part in one.parts)
    assert not (tmp_path / "figures").exists()


def test_the_share_that_groups_explain_is_between_none_and_all():
    random = np.random.default_rng(0)
    groups = np.arange(400) % 4
    noise = random.normal(size=400)
    features = np.stack([groups, noise, groups + np.sqrt(1.25) * noise, np.ones(400)], 1)
    shares = fedcd_small.explained(features, groups)
    np.testing.assert_allclose(shares[[0, 3]], [1, 0])
    assert shares[1] < 0.05
    assert abs(shares[2] - 0.5) < 0.1
