"""Scans in NIfTI become slices with masks; the prostate's six sites and its protocols."""

import sys

import numpy as np
import pytest
from PIL import Image

import scans
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.division.clients import make_clients
from fedjax_bn.data.domain import splits
from fedjax_bn.data.label_trees import MASK, SPACING, VOLUME
from fedjax_bn.data.masks import volumes
from fedjax_bn.data.masks.assemble import Pair
from fedjax_bn.data.masks.prostate import load_prostate
from fedjax_bn.data.masks.volumes import REPEATED, Slices, to_bytes
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.build import build

nibabel = pytest.importorskip("nibabel", reason="pip install 'fedjax_bn[nifti]'")
CLASSES, VALUES = ("background", "prostate"), {0: 0, 1: 1, 2: 1}
DEPTH = scans.SHAPE[2]


def read_one(folder, image=None, mask=None, **how):
    """The pool of one scan of 12 columns, 16 rows and 6 slices."""
    image = scans.write_volume(folder / "a.nii.gz", scans.voxels() if image is None else image)
    mask = scans.write_volume(folder / "b.nii.gz", scans.mask() if mask is None else mask)
    slices = Slices(**{"image_size": 16, "progress": False} | how)
    domains = {"A": [Pair(image, mask, "patient")]}
    source = volumes.to_source("x", folder, domains, slices, classes=CLASSES, values=VALUES)
    return source.pools[0], source


def as_harmofl(volume):
    """The intensities of HarmoFL's code: float64, clipped and stretched, cut to bytes."""
    high, low = np.quantile(volume, 0.99), volume.min()
    clipped = np.where(volume > high, high, volume)
    return ((clipped - low) / (high - low) * 255).astype(np.uint8)


def test_intensities_are_clipped_at_the_quantile_of_the_whole_volume(tmp_path):
    rng = np.random.default_rng(1)
    volume = rng.normal(100, 40, (16, 16, 5)).astype(np.float32)
    volume[3, 3, 2] = 1e5
    mask = scans.mask((16, 16, 5))
    pool, _ = read_one(tmp_path, volume, mask, channels=REPEATED)
    expected = as_harmofl(np.float64(volume).T)
    for channel in range(3):
        assert np.array_equal(pool.images[..., channel], expected)
    assert expected.max() == 255
    assert not to_bytes(np.full((2, 3), 7.0)).any()
    few = np.where(np.arange(1000) < 5, 40.0, -2.0)  # below the quantile is one intensity
    assert to_bytes(few).tolist() == [255] * 5 + [0] * 995


def test_channels_are_neighbours_and_ends_are_their_own(tmp_path):
    pool, _ = read_one(tmp_path, image_size=12, crop=12)
    middle = pool.images[..., 1]
    assert np.array_equal(pool.images[1:, ..., 0], middle[:-1])
    assert np.array_equal(pool.images[:-1, ..., 2], middle[1:])
    assert np.array_equal(pool.images[0, ..., 0], middle[0])
    assert np.array_equal(pool.images[-1, ..., 2], middle[-1])
    assert np.array_equal(middle, as_harmofl(scans.voxels().T)[:, 2:-2])


def test_masks_are_stretched_to_the_nearest_value_and_labels_joined(tmp_path):
    pool, _ = read_one(tmp_path, image_size=32)
    for stored, slice_ in zip(pool.labels[MASK], scans.mask().T > 0, strict=True):
        size = (32, 32)
        expected = Image.fromarray(slice_.astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
        assert np.array_equal(stored, expected)
    assert pool.labels[MASK].dtype == np.uint8
    assert pool.labels[VOLUME].tolist() == [0] * DEPTH
    assert set(pool.names) == {"patient"}


@pytest.mark.parametrize(("size", "crop"), [(16, 0), (32, 0), (8, 12)])
def test_the_spacing_is_that_of_the_stored_pixels(tmp_path, size, crop):
    pool, _ = read_one(tmp_path, image_size=size, crop=crop)
    rows, columns = (crop, crop) if crop else (16, 12)
    # The side of the whole slice in millimetres stays what it was.
    between, down, across = pool.labels[SPACING][0]
    assert between == 3
    np.testing.assert_allclose([down * size, across * size], [0.75 * rows, 0.5 * columns])


@pytest.mark.parametrize(("labelled", "kept"), [(False, 6), (True, 2)])
def test_slices_are_left_out_by_choice_and_counted(tmp_path, labelled, kept):
    mask = scans.mask()
    mask[3, 4, [0, -1]] = 1  # the first and the last slice
    mask[..., 2] = 0
    pool, source = read_one(tmp_path, mask=mask, labelled=labelled)
    assert len(pool.images) == kept
    assert f"1 scans (A 1) with 6 slices, of which {6 - kept} left out" in source.notes


def test_a_second_reading_comes_from_the_cache_and_a_changed_file_does_not(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first, _ = read_one(tmp_path / "data", cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(volumes, "voxels_of", None)
        again = volumes.to_source(
            "x",
            tmp_path / "data",
            {"A": [Pair(tmp_path / "data/a.nii.gz", tmp_path / "data/b.nii.gz", "patient")]},
            Slices(16, progress=False, cache=cache),
            classes=CLASSES,
            values=VALUES,
        )
    assert np.array_equal(again.pools[0].images, first.images)
    changed, _ = read_one(tmp_path / "data", image=scans.voxels(5), cache=cache)
    assert not np.array_equal(changed.images, first.images)


def cut_off(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("file", "array", "damage", "reason"),
    [
        ("a.nii.gz", scans.voxels(), cut_off, ""),
        ("b.nii.gz", scans.mask(), cut_off, ""),
        ("a.nii", scans.voxels(), cut_off, ""),
        ("a.nii", scans.voxels(), lambda path: path.write_bytes(b"no"), ""),
        ("a.nii", scans.voxels(shape=(12, 16, 6, 2)), None, r"\(12, 16, 6, 2\)"),
        ("b.nii", scans.mask((12, 16, 5)), None, r"\(12, 16, 5\).*\(12, 16, 6\)"),
        ("b.nii", scans.mask(labels=(1, 7)), None, "7"),
        ("b.nii", scans.mask() * np.float32(0.5), None, "0.5"),
        ("a.nii", np.full(scans.SHAPE, np.nan, np.float32), None, "finite"),
    ],
)
def test_a_file_that_is_not_right_is_named_in_one_line(tmp_path, file, array, damage, reason):
    place = {"a": scans.write_volume(tmp_path / "a.nii.gz", scans.voxels())}
    place["b"] = scans.write_volume(tmp_path / "b.nii.gz", scans.mask())
    place[file[0]] = scans.write_volume(tmp_path / file, array)
    if damage:
        damage(place[file[0]])
    domains = {"A": [Pair(place["a"], place["b"], "patient")]}
    slices = Slices(16, progress=False)
    with pytest.raises(ValueError, match=f"{file}.*{reason}") as error:
        volumes.to_source("x", tmp_path, domains, slices, classes=CLASSES, values=VALUES)
    assert "\n" not in str(error.value)


def test_masks_without_any_label_and_slices_below_the_crop_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"b\.nii\.gz"):
        read_one(tmp_path, mask=np.zeros(scans.SHAPE, np.uint8))
    one = scans.voxels()[..., :1], scans.mask()[..., 2:3]
    assert len(read_one(tmp_path, *one)[0].images) == 1
    with pytest.raises(ValueError, match="'A'"):
        read_one(tmp_path, *one, labelled=True)
    with pytest.raises(ValueError, match=r"a\.nii\.gz .*13"):
        read_one(tmp_path, crop=13)


def test_a_mask_elsewhere_in_space_is_noted(tmp_path):
    assert not any("space" in note for note in read_one(tmp_path)[1].notes)
    image = scans.write_volume(tmp_path / "a.nii", scans.voxels())
    mask = scans.write_volume(tmp_path / "b.nii", scans.mask(), (0.5, 0.75, 1.0))
    domains = {"A": [Pair(image, mask, "patient")]}
    how = {"classes": CLASSES, "values": VALUES}
    source = volumes.to_source("x", tmp_path, domains, Slices(16, progress=False), **how)
    assert any("another place in space" in note and "b.nii" in note for note in source.notes)


def test_without_nibabel_the_error_names_the_extra(tmp_path, monkeypatch):
    root = scans.write_prostate(tmp_path, cases=1)
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(ImportError, match=r"'fedjax_bn\[nifti\]'"):
        load_prostate(root)


# The prostate


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
    for split in ("stratified", "holdout"):
        clients, (unseen,) = make_clients(
            source, target="HK", split=split, validation=0.1, test=0.2, seed=3
        )
        assert len(unseen.test.images) == 10 * DEPTH
        for domain in clients.domains:
            owned = {part: set(own.names) for part, own in splits(domain)}
            assert sum(map(len, owned.values())) == len(set.union(*owned.values())) == 10
            assert [len(owned[part]) for part in ("train", "validation", "test")] == [7, 1, 2]


def test_harmofls_protocol_divides_slices_and_its_note_warns(sites):
    how = {"protocol": "harmofl", "domains": ("RUNMC", "BMC")}
    source = load(sites, **how)
    assert any("slices, as HarmoFL's code does: those of one patient" in n for n in source.notes)
    for pool in source.pools:
        count = len(pool.images)
        assert count == 10 * 3  # those with a label
        assert len(set(pool.names)) == count
        sizes = [int((pool.parts == part).sum()) for part in (TRAIN, VALIDATION, TEST)]
        assert sizes == [19, 5, 6]  # int(0.64 n), up to int(0.8 n), the rest
        patient = np.array([name.rpartition("/")[0] for name in pool.names])
        assert set(patient[pool.parts == TRAIN]) & set(patient[pool.parts == TEST])
        # Six slices of several patients have gaps, and are not scored as bodies.
        assert VOLUME not in pool.labels
    clients, _ = make_clients(source)
    assert [len(part.images) for _, part in splits(clients.domains[0])] == [19, 5, 6]
    again = load(sites, **how)
    assert np.array_equal(again.pools[0].parts, source.pools[0].parts)
    assert not np.array_equal(source.pools[1].parts, source.pools[0].parts)


def test_fl_medsegbenchs_protocol_divides_patients_and_cuts_the_middle(tmp_path):
    shape = (260, 262, 5)
    root = scans.write_prostate(tmp_path, cases=10, sites=("UCL",), shape=shape)
    how = {"domains": ("UCL",), "protocol": "fl_medsegbench", "progress": False}
    (pool,) = load_prostate(root, image_size=256, **how).pools
    own = {part: set(pool.names[pool.parts == part]) for part in (TRAIN, VALIDATION, TEST)}
    assert [len(own[part]) for part in (TRAIN, VALIDATION, TEST)] == [7, 1, 2]
    assert len(set.union(*own.values())) == 10
    grey = as_harmofl(scans.voxels(0, shape).T)
    assert np.array_equal(pool.images[0], np.repeat(grey[2, 3:-3, 2:-2, None], 3, -1))
    assert pool.labels[SPACING][0].tolist() == [3.0, 0.75, 0.5]


def test_sites_are_chosen_and_have_the_names_of_harmofls_code_too(tmp_path):
    root = scans.write_prostate(tmp_path, cases=1, sites=("ISBI", "ISBI_1.5", "UCL"))
    source = load(root, domains=("BMC", "RUNMC"))
    assert [pool.name for pool in source.pools] == ["BMC", "RUNMC"]
    assert set(source.pools[1].names) == {"ISBI/Case00.nii.gz"}
    with pytest.raises(FileNotFoundError, match="I2CVB"):
        load(root)
    with pytest.raises(ValueError, match=r"XYZ.*RUNMC"):
        load(root, domains=("XYZ",))


@pytest.mark.parametrize(
    ("gone", "culprit"),
    [
        ("Case01.nii.gz", "UCL/Case01_segmentation.nii.gz"),
        ("Case00_segmentation.nii.gz", "UCL/Case00.nii.gz"),
        ("*", "UCL"),
    ],
)
def test_a_missing_file_is_named(tmp_path, gone, culprit):
    root = scans.write_prostate(tmp_path, cases=2, sites=("UCL",))
    for file in (root / "UCL").glob(gone):
        file.unlink()
    with pytest.raises(ValueError, match=culprit):
        load(root, domains=("UCL",))


SMALL = [("data.image_size", "16"), ("data.cache", ""), ("model", "UNet:width=2:levels=1")]


def test_the_configuration_builds_with_its_protocols(sites):
    path = [("data.path", str(sites)), *SMALL]
    leaking = build(read("configs/prostate.py:protocol=harmofl", path))
    assert leaking.task.segments == 2
    assert [len(d.test.images) for d in leaking.internal.domains] == [6] * 6
    unseen = build(read("configs/prostate.py:protocol=feddg", path))
    assert [domain.name for domain in unseen.unseen] == ["UCL"]
    assert read("configs/prostate.py").data.protocol == ""


def test_a_protocol_is_for_the_prostate_alone():
    config = read("quickstart", [("data.protocol", "harmofl")])
    with pytest.raises(ConfigError, match=r"data\.protocol"):
        build(config)
    with pytest.raises(ConfigError, match="'fedavg'"):
        read("configs/prostate.py", [("data.protocol", "fedavg")])
