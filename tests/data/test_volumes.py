"""Scans in NIfTI become slices with masks; the prostate's six sites and protocols."""

import sys

import numpy as np
import pytest
from PIL import Image

import scans
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.division.clients import make_clients
from fedjax_bn.data.domain import splits
from fedjax_bn.data.labels import MASK, SPACING, VOLUME
from fedjax_bn.data.masks.assemble import Pair, paired_source
from fedjax_bn.data.masks.mask_folders import load_mask_folders
from fedjax_bn.data.masks.prostate import load_prostate
from fedjax_bn.data.masks.volumes import REPEATED, Slices, shape_of, slices_of
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.build import build
from fedjax_bn.run.experiment.datasets import slices_in
from fedjax_bn.tasks.segmentation.surfaces import surface_scores

nibabel = pytest.importorskip("nibabel", reason="pip install 'fedjax_bn[nifti]'")
ornt = nibabel.orientations
CLASSES = ("background=0", "prostate=1+2")
DEPTH = scans.SHAPE[2]
AFFINE = np.diag([0.5, 0.75, 3.0, 1.0])


def saved(path, array, affine=AFFINE, unit="mm"):
    volume = nibabel.Nifti1Image(array, affine)
    volume.header.set_xyzt_units(unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    volume.to_filename(path)
    return path


def source_of(image, mask, classes=(), **options):
    slices = Slices(**{"image_size": 16} | options)
    domains = {"A": [Pair(image, mask, "patient")]}
    return paired_source("x", image.parents[1], domains, slices, classes, progress=False)


def read_one(folder, image=None, mask=None, **how):
    """The pool of one scan of 12 columns, 16 rows and 6 slices."""
    image = saved(folder / "a.nii.gz", scans.voxels() if image is None else image)
    mask = saved(folder / "b.nii.gz", scans.mask() if mask is None else mask)
    source = source_of(image, mask, CLASSES, **how)
    return source.pools[0], source


def as_harmofl(volume):
    """The intensities of HarmoFL's code: float64, clipped and stretched, cut to bytes."""
    high, low = np.quantile(volume, 0.99), volume.min()
    clipped = np.where(volume > high, high, volume)
    return ((clipped - low) / (high - low) * 255).astype(np.uint8)


def turned(volume, codes):
    """The same volume with its axes exchanged and mirrored to run to these directions."""
    return volume.as_reoriented(
        ornt.ornt_transform(ornt.io_orientation(volume.affine), ornt.axcodes2ornt(codes))
    )


def test_intensities_are_clipped_at_the_quantile_of_the_whole_volume(tmp_path):
    volume = np.random.default_rng(1).normal(100, 40, (16, 16, 5)).astype(np.float32)
    volume[3, 3, 2] = 1e5
    pool, _ = read_one(tmp_path, volume, scans.mask((16, 16, 5)), channels=REPEATED)
    expected = as_harmofl(np.float64(volume).T)
    assert np.array_equal(pool.images, np.repeat(expected[..., None], 3, -1))
    few = np.where(np.arange(1000) < 5, 40.0, -2.0)  # below the quantile is one intensity
    for values, bright in ((few, 5), (np.full(1000, 7.0), 0)):
        cube = values.reshape(10, 10, 10)
        pool, _ = read_one(tmp_path, cube, scans.mask(cube.shape), image_size=10, channels=REPEATED)
        assert (pool.images == 255).sum() == 3 * bright
        assert np.isin(pool.images, (0, 255)).all()


def test_channels_are_neighbours_and_ends_are_their_own(tmp_path):
    pool, _ = read_one(tmp_path, image_size=12, crop=12)
    middle = pool.images[..., 1]
    assert np.array_equal(pool.images[1:, ..., 0], middle[:-1])
    assert np.array_equal(pool.images[:-1, ..., 2], middle[1:])
    assert np.array_equal(pool.images[0, ..., 0], middle[0])
    assert np.array_equal(pool.images[-1, ..., 2], middle[-1])
    assert np.array_equal(middle, as_harmofl(scans.voxels().T)[:, 2:-2])


@pytest.mark.parametrize(("size", "crop"), [(16, 0), (8, 12)])
def test_the_spacing_is_that_of_the_stored_pixels_and_of_the_affine(tmp_path, size, crop):
    volume = nibabel.Nifti1Image(scans.voxels(), AFFINE)
    volume.header.set_zooms((9, 9, 9))
    volume.to_filename(tmp_path / "a.nii")
    mask = saved(tmp_path / "b.nii", scans.mask())
    (pool,) = source_of(tmp_path / "a.nii", mask, image_size=size, crop=crop).pools
    rows, columns = (crop, crop) if crop else (16, 12)
    # The side of the whole slice in millimetres stays what it was.
    between, down, across = pool.labels[SPACING][0]
    assert between == 3
    np.testing.assert_allclose([down * size, across * size], [0.75 * rows, 0.5 * columns])
    assert shape_of(tmp_path / "a.nii", Slices(16))[1] == pytest.approx(0.5 * 0.75 * 3 / 1000)


@pytest.mark.parametrize(
    ("unit", "millimetres"), [("meter", 1000), ("mm", 1), ("micron", 1e-3), ("unknown", 1)]
)
def test_distances_are_millimetres_whatever_the_headers_unit(tmp_path, unit, millimetres):
    """A cube of voxels of 2 mm that is moved by two of them is 4 mm away everywhere along it."""
    mask = np.zeros((16, 16, 8), np.uint8)
    mask[4:8, 4:8, 2:6] = 1
    affine = np.diag([2 / millimetres] * 3 + [1])
    image = saved(tmp_path / "a.nii", scans.voxels(shape=mask.shape), affine, unit)
    (pool,) = source_of(image, saved(tmp_path / "b.nii", mask, affine, unit)).pools
    np.testing.assert_allclose(pool.labels[SPACING], 2, rtol=1e-5)
    distances = surface_scores(np.roll(pool.labels[MASK], 2, axis=1), pool.labels, 2)
    assert distances[0, 0, 0] == pytest.approx(4, rel=1e-5)
    assert shape_of(image, Slices(16))[1] == pytest.approx(0.008, rel=1e-5)


@pytest.mark.parametrize("mask_codes", ["same", "RAS"])
@pytest.mark.parametrize("codes", ["LPS", "PIR", "SLA"])
def test_every_orientation_gives_the_slices_of_the_nearest_ras_axes(tmp_path, codes, mask_codes):
    tilted, angle = AFFINE.copy(), np.deg2rad(10)
    cosine, sine = np.cos(angle), np.sin(angle)
    tilted[:2, :2] = np.array([[cosine, -sine], [sine, cosine]]) * (0.5, 0.75)
    tilted[:3, 3] = 30, -20, 5
    image, mask = (nibabel.Nifti1Image(x, tilted) for x in (scans.voxels(), scans.mask()))
    image.to_filename(tmp_path / "a.nii")
    mask.to_filename(tmp_path / "b.nii")
    (expected,) = source_of(tmp_path / "a.nii", tmp_path / "b.nii").pools
    turned(image, codes).to_filename(tmp_path / "c.nii")
    turned(mask, codes if mask_codes == "same" else mask_codes).to_filename(tmp_path / "d.nii")
    source = source_of(tmp_path / "c.nii", tmp_path / "d.nii")
    (pool,) = source.pools
    np.testing.assert_array_equal(pool.images, expected.images)
    np.testing.assert_array_equal(pool.labels[MASK], expected.labels[MASK])
    np.testing.assert_allclose(pool.labels[SPACING], expected.labels[SPACING], rtol=1e-6)
    assert not any("place in space" in note for note in source.notes)
    np.testing.assert_array_equal(slices_of(tmp_path / "c.nii", Slices(16)), expected.images)


def test_a_mask_that_lost_its_affine_belongs_to_the_voxels_of_its_image(tmp_path):
    arrays = scans.voxels(), scans.mask()
    image, mask = (turned(nibabel.Nifti1Image(x, AFFINE), "LIP") for x in arrays)
    image.to_filename(tmp_path / "a.nii")
    mask.to_filename(tmp_path / "b.nii")
    lost = saved(tmp_path / "c.nii", np.asarray(mask.dataobj), np.eye(4))
    (expected,) = source_of(tmp_path / "a.nii", tmp_path / "b.nii").pools
    source = source_of(tmp_path / "a.nii", lost)
    np.testing.assert_array_equal(source.pools[0].labels[MASK], expected.labels[MASK])
    assert any("place in space" in note and "c.nii" in note for note in source.notes)


@pytest.mark.parametrize(
    ("plane", "axes"), [("axial", (2, 1, 0)), ("coronal", (1, 2, 0)), ("sagittal", (0, 2, 1))]
)
def test_slices_are_cut_in_the_plane(tmp_path, plane, axes):
    """Sagittal slices of 4 mm, as of a knee, in the axes right, front, top."""
    voxels, mask = scans.voxels(shape=(6, 16, 16)), np.zeros((6, 16, 16), np.uint8)
    mask[1:3, 2:9, 5:11] = 1
    affine = np.diag([4.0, 0.5, 0.75, 1.0])
    image = turned(nibabel.Nifti1Image(voxels, affine), "PIR")  # the slices of the file
    image.to_filename(tmp_path / "a.nii")
    how = {"plane": plane, "channels": REPEATED}
    (pool,) = source_of(tmp_path / "a.nii", saved(tmp_path / "b.nii", mask, affine), **how).pools
    assert pool.labels[SPACING][0, 0] == (4.0, 0.5, 0.75)[axes[0]]
    assert len(pool.images) == mask.shape[axes[0]]
    if plane == "sagittal":  # 16 x 16 pixels, which are not stretched
        np.testing.assert_array_equal(pool.labels[MASK], mask.transpose(axes))
        np.testing.assert_array_equal(pool.images[..., 0], as_harmofl(voxels).transpose(axes))


def test_a_window_gives_tissue_its_greys_beside_padding(tmp_path):
    voxels = np.random.default_rng(0).integers(-100, 200, (16, 16, 6)).astype(np.int16)
    voxels[:3] = -3024
    image, mask = saved(tmp_path / "a.nii", voxels), np.zeros_like(voxels, np.uint8)
    mask[5:9, 5:9] = 1
    mask = saved(tmp_path / "b.nii", mask)
    whole = source_of(image, mask, channels=REPEATED)
    window = {"window": (-160.0, 240.0), "channels": REPEATED}
    source = source_of(image, mask, **window)
    expected = np.clip((voxels.T.astype(np.int64) + 160) * 255 // 400, 0, 255)
    np.testing.assert_array_equal(source.pools[0].images[..., 0], expected)
    np.testing.assert_array_equal(slices_of(image, Slices(16, **window))[..., 0], expected)
    assert source.key != whole.key


def cut_off(content):
    return content[: len(content) // 2]


def flat(content):
    """With an affine whose first row is 0."""
    return content[:280] + bytes(16) + content[296:]


def with_value(value):
    labels = scans.mask().astype(np.float32)
    labels[0, 0, 0] = value
    return labels


@pytest.mark.parametrize(
    ("file", "array", "damage", "reason"),
    [
        ("a.nii.gz", scans.voxels(), cut_off, ""),
        ("b.nii.gz", scans.mask(), cut_off, ""),
        ("a.nii", scans.voxels(), cut_off, ""),
        ("a.nii", scans.voxels(), flat, "affine"),
        ("a.nii", scans.voxels(shape=(12, 16, 6, 2)), None, r"\(12, 16, 6, 2\)"),
        ("a.nii", np.full(scans.SHAPE, np.nan, np.float32), None, "finite"),
        ("a.nii", scans.voxels(shape=(10, 16, 6)), None, "11"),
        ("b.nii", scans.mask((12, 16, 5)), None, r"\(12, 16, 5\).*\(12, 16, 6\)"),
        ("b.nii", scans.mask(labels=(1, 7)), None, "7"),
        ("b.nii", np.zeros(scans.SHAPE, np.uint8), None, "0"),
        *(("b.nii", with_value(x), None, f"value {x:g};") for x in (0.99, 256, -1, np.nan)),
    ],
)
def test_a_file_that_is_not_right_is_named_in_one_line(tmp_path, file, array, damage, reason):
    place = {"a": scans.write_volume(tmp_path / "a.nii.gz", scans.voxels())}
    place["b"] = scans.write_volume(tmp_path / "b.nii.gz", scans.mask())
    place[file[0]] = scans.write_volume(tmp_path / file, array)
    if damage:
        place[file[0]].write_bytes(damage(place[file[0]].read_bytes()))
    with pytest.raises(ValueError, match=f"{file}.*{reason}") as error:
        source_of(place["a"], place["b"], CLASSES, crop=11)
    assert "\n" not in str(error.value)


def test_without_nibabel_the_error_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.nii").touch()
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(ImportError, match=r"'fedjax_bn\[nifti\]'"):
        slices_of(tmp_path / "a.nii", Slices(16))


def test_plane_and_window_are_those_of_a_served_model_and_of_folders(tmp_path):
    config = read("configs/masks.py", [("data.window", "-160,240.5"), ("data.plane", "sagittal")])
    slices = slices_in(config, {"masks": [MASK, SPACING, VOLUME]})
    assert (slices.plane, slices.window) == ("sagittal", (-160.0, 240.5))
    image = saved(tmp_path / "A/images/1.nii", scans.voxels())
    label = saved(tmp_path / "A/masks/1.nii", scans.mask(labels=(1, 1)))
    direct = source_of(image, label, plane="sagittal", window=(0.0, 500.0))
    options = {"plane": "sagittal", "window": ("0", "500"), "image_size": 16, "progress": False}
    loaded = load_mask_folders(tmp_path, **options)
    np.testing.assert_array_equal(loaded.pools[0].images, direct.pools[0].images)


def test_masks_are_stretched_to_the_nearest_value_and_labels_joined(tmp_path):
    pool, source = read_one(tmp_path, image_size=32)
    for stored, slice_ in zip(
        pool.labels[MASK], (scans.mask().T > 0).astype(np.uint8), strict=True
    ):
        expected = Image.fromarray(slice_).resize((32, 32), Image.Resampling.NEAREST)
        assert np.array_equal(stored, expected)
    assert pool.labels[MASK].dtype == np.uint8
    assert pool.labels[VOLUME].tolist() == [0] * DEPTH
    assert set(pool.names) == {"patient"}
    assert source.classes == ("background", "prostate")


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
    ("gone", "culprit"), [("Case01.nii.gz", "UCL/Case01_segmentation.nii.gz"), ("*", "UCL")]
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
