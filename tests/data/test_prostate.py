"""The prostate's six sites and its protocols."""

import numpy as np
import pytest

import scans
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.division.clients import make_clients
from fedjax_bn.data.domain import splits
from fedjax_bn.data.label_trees import MASK, SPACING, VOLUME
from fedjax_bn.data.masks.prostate import load_prostate
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.build import build

pytest.importorskip("nibabel", reason="pip install 'fedjax_bn[nifti]'")
DEPTH = scans.SHAPE[2]
PARTS = (TRAIN, VALIDATION, TEST)


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Ten patients of six slices at each of six sites."""
    return scans.write_prostate(tmp_path_factory.mktemp("prostate"), cases=10)


def load(root, **how):
    return load_prostate(root, image_size=16, progress=False, **how)


def test_patients_are_never_separated_by_default(sites):
    source = load(sites)
    assert [pool.name for pool in source.pools] == list(scans.SITES)
    assert {len(pool.images) for pool in source.pools} == {10 * DEPTH}
    assert source.classes == ("background", "prostate")
    numbers = np.concatenate([pool.labels[VOLUME] for pool in source.pools])
    assert np.array_equal(np.unique(numbers, return_counts=True)[1], [DEPTH] * 60)
    clients, (unseen,) = make_clients(source, target="HK", validation=0.1, test=0.2, seed=3)
    assert len(unseen.test.images) == 10 * DEPTH
    for domain in clients.domains:
        owned = [set(own.names) for _, own in splits(domain)]
        assert [len(names) for names in owned] == [7, 1, 2]
        assert len(set.union(*owned)) == 10


def test_harmofls_protocol_divides_slices_and_its_note_warns(sites):
    how = {"protocol": "harmofl", "domains": ("RUNMC", "BMC")}
    source = load(sites, **how)
    assert any("slices, as HarmoFL's code does: those of one patient" in n for n in source.notes)
    for pool in source.pools:
        assert pool.labels[MASK].any((1, 2)).all()
        assert len(set(pool.names)) == 10 * 3  # those with a label
        sizes = [int((pool.parts == part).sum()) for part in PARTS]
        assert sizes == [19, 5, 6]  # int(0.64 n), up to int(0.8 n), the rest
        patient = np.array([name.rpartition("/")[0] for name in pool.names])
        assert set(patient[pool.parts == TRAIN]) & set(patient[pool.parts == TEST])
        # Six slices of several patients have gaps, and are not scored as bodies.
        assert VOLUME not in pool.labels
    assert np.array_equal(load(sites, **how).pools[0].parts, source.pools[0].parts)
    assert not np.array_equal(source.pools[1].parts, source.pools[0].parts)


def test_the_first_and_last_slice_of_a_volume_are_left_out_though_they_have_a_label(tmp_path):
    root = scans.write_prostate(tmp_path, cases=2, sites=("UCL",))
    mask = scans.mask()
    mask[3, 4, [0, -1]] = 1
    scans.write_volume(root / "UCL/Case00_segmentation.nii.gz", mask)
    (pool,) = load(root, protocol="harmofl", domains=("UCL",)).pools
    assert len(pool.images) == 3 + 3
    for case in range(2):
        mask = scans.mask()[..., 2:3]
        scans.write_volume(root / f"UCL/Case{case:02}.nii.gz", scans.voxels()[..., :1])
        scans.write_volume(root / f"UCL/Case{case:02}_segmentation.nii.gz", mask)
    with pytest.raises(ValueError, match="'UCL'"):
        load(root, protocol="harmofl", domains=("UCL",))


def test_fl_medsegbenchs_protocol_divides_patients_and_cuts_the_middle(tmp_path):
    shape = (260, 262, 5)
    root = scans.write_prostate(tmp_path, cases=10, sites=("UCL",), shape=shape)
    how = {"domains": ("UCL",), "protocol": "fl_medsegbench", "progress": False}
    (pool,) = load_prostate(root, image_size=256, **how).pools
    owned = [set(pool.names[pool.parts == part]) for part in PARTS]
    assert [len(names) for names in owned] == [7, 1, 2]
    assert len(set.union(*owned)) == 10
    voxels = np.float64(scans.voxels(0, shape).T)
    high, low = np.quantile(voxels, 0.99), voxels.min()
    grey = (255 * ((np.minimum(voxels, high) - low) / (high - low))).astype(np.uint8)
    assert np.array_equal(pool.images[0], np.repeat(grey[2, 3:-3, 2:-2, None], 3, -1))
    assert pool.labels[SPACING][0].tolist() == [3.0, 0.75, 0.5]


def test_sites_are_chosen_and_have_the_names_of_harmofls_code_too(tmp_path):
    root = scans.write_prostate(tmp_path, cases=1, sites=("ISBI", "ISBI_1.5", "UCL"))
    source = load(root, domains=("BMC", "RUNMC"))
    assert [pool.name for pool in source.pools] == ["BMC", "RUNMC"]
    assert set(source.pools[1].names) == {"ISBI/Case00.nii.gz"}
    for domains, culprit in (((), "I2CVB"), (("BMC", "XYZ"), "XYZ")):
        with pytest.raises(FileNotFoundError, match=culprit):
            load(root, domains=domains)


@pytest.mark.parametrize(
    ("gone", "culprit"),
    [("Case01.nii.gz", "UCL/Case01_segmentation.nii.gz"), ("*", "UCL")],
)
def test_a_missing_file_is_named(tmp_path, gone, culprit):
    root = scans.write_prostate(tmp_path, cases=2, sites=("UCL",))
    for file in (root / "UCL").glob(gone):
        file.unlink()
    with pytest.raises(ValueError, match=culprit):
        load(root, domains=("UCL",))


def test_the_configuration_builds_with_its_protocols(sites):
    small = [("data.image_size", "16"), ("data.cache", ""), ("model", "UNet:width=2:levels=1")]
    path = [("data.path", str(sites)), *small]
    leaking = build(read("configs/prostate.py:protocol=harmofl", path))
    assert leaking.task.segments == 2
    assert [len(d.test.images) for d in leaking.internal.domains] == [6] * 6
    unseen = build(read("configs/prostate.py:protocol=feddg", path))
    assert [domain.name for domain in unseen.unseen] == ["UCL"]
    with pytest.raises(ConfigError, match="'fedavg'"):
        read("configs/prostate.py", [("data.protocol", "fedavg")])
