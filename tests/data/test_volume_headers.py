"""What NIfTI means: units, places, orientations, padding, labels and checksums."""

import numpy as np
import pytest

import scans
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.ranges import GREYS
from fedjax_bn.data.label_trees import MASK, SPACING, VOLUME
from fedjax_bn.data.masks import volumes
from fedjax_bn.data.masks.assemble import Pair
from fedjax_bn.data.masks.mask_folders import load_mask_folders
from fedjax_bn.data.masks.prostate import load_prostate
from fedjax_bn.data.masks.scans import shape_of, slices_of
from fedjax_bn.data.masks.volumes import Slices
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.datasets import slices_in
from fedjax_bn.tasks.segmentation.surfaces import surface_scores

nibabel = pytest.importorskip("nibabel", reason="pip install 'fedjax_bn[nifti]'")
ornt = nibabel.orientations
AFFINE = np.diag([0.5, 0.75, 3.0, 1.0])


def saved(path, array, affine=AFFINE, unit="mm"):
    volume = nibabel.Nifti1Image(array, affine)
    volume.header.set_xyzt_units(unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    volume.to_filename(path)
    return path


def turned(volume, codes):
    """The same volume with its axes exchanged and mirrored to run to these directions."""
    return volume.as_reoriented(
        ornt.ornt_transform(ornt.io_orientation(volume.affine), ornt.axcodes2ornt(codes))
    )


def source_of(image, mask, **options):
    slices = Slices(**{"image_size": 16, "progress": False} | options)
    domains = {"A": [Pair(image, mask, "patient")]}
    return volumes.to_source("x", image.parent, domains, slices)


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
    labels = {name: pool.labels[name] for name in (MASK, VOLUME, SPACING)}
    distances = surface_scores(np.roll(pool.labels[MASK], 2, axis=1), labels, 2)
    assert distances[0, 0, 0] == pytest.approx(4, rel=1e-5)
    assert shape_of(image, Slices(16))[1] == pytest.approx(0.008, rel=1e-5)


def test_the_spacing_is_that_of_the_affine_and_not_of_pixdim(tmp_path):
    volume = nibabel.Nifti1Image(scans.voxels(), AFFINE)
    volume.header.set_zooms((9, 9, 9))
    volume.to_filename(tmp_path / "a.nii")
    assert nibabel.load(tmp_path / "a.nii").header.get_zooms() == (9, 9, 9)
    (pool,) = source_of(tmp_path / "a.nii", saved(tmp_path / "b.nii", scans.mask())).pools
    np.testing.assert_allclose(pool.labels[SPACING][0], [3, 0.75 * 16 / 16, 0.5 * 12 / 16])
    assert shape_of(tmp_path / "a.nii", Slices(16))[1] == pytest.approx(0.5 * 0.75 * 3 / 1000)


def test_an_affine_without_three_directions_is_refused_by_name(tmp_path):
    flat = saved(tmp_path / "a.nii", scans.voxels())
    content = bytearray(flat.read_bytes())
    content[280:296] = bytes(16)  # the first row of sform
    flat.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.nii .*affine"):
        source_of(flat, saved(tmp_path / "b.nii", scans.mask()))


@pytest.mark.parametrize("mask_codes", ["same", "RAS"])
@pytest.mark.parametrize("codes", ["LPS", "RAI", "PIR", "SLA"])
def test_every_orientation_gives_the_slices_of_the_nearest_ras_axes(tmp_path, codes, mask_codes):
    tilted = AFFINE.copy()
    angle = np.deg2rad(10)
    tilted[:2, :2] = [
        [0.5 * np.cos(angle), -0.75 * np.sin(angle)],
        [0.5 * np.sin(angle), 0.75 * np.cos(angle)],
    ]
    tilted[:3, 3] = 30, -20, 5
    image = nibabel.Nifti1Image(scans.voxels(), tilted)
    mask = nibabel.Nifti1Image(scans.mask(), tilted)
    image.to_filename(tmp_path / "a.nii")
    mask.to_filename(tmp_path / "b.nii")
    straight = source_of(tmp_path / "a.nii", tmp_path / "b.nii")
    turned(image, codes).to_filename(tmp_path / "c.nii")
    turned(mask, codes if mask_codes == "same" else mask_codes).to_filename(tmp_path / "d.nii")
    source = source_of(tmp_path / "c.nii", tmp_path / "d.nii")
    (pool,), (expected,) = source.pools, straight.pools
    np.testing.assert_array_equal(pool.images, expected.images)
    np.testing.assert_array_equal(pool.labels[MASK], expected.labels[MASK])
    np.testing.assert_allclose(pool.labels[SPACING], expected.labels[SPACING], rtol=1e-6)
    assert not any("place in space" in note for note in source.notes)
    np.testing.assert_array_equal(
        slices_of(tmp_path / "c.nii", Slices(16)), slices_of(tmp_path / "a.nii", Slices(16))
    )


def test_a_mask_that_lost_its_affine_belongs_to_the_voxels_of_its_image(tmp_path):
    image = turned(nibabel.Nifti1Image(scans.voxels(), AFFINE), "LIP")
    mask = turned(nibabel.Nifti1Image(scans.mask(), AFFINE), "LIP")
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
def test_slices_are_cut_in_the_plane_and_thick_ones_of_another_are_noted(tmp_path, plane, axes):
    """Sagittal slices of 4 mm, as of a knee, in the axes right, front, top."""
    voxels, mask = scans.voxels(shape=(6, 16, 16)), np.zeros((6, 16, 16), np.uint8)
    mask[1:3, 2:9, 5:11] = 1
    affine = np.diag([4.0, 0.5, 0.75, 1.0])
    image = turned(nibabel.Nifti1Image(voxels, affine), "PIR")  # the slices of the file
    image.to_filename(tmp_path / "a.nii")
    how = {"plane": plane, "channels": "repeated"}
    source = source_of(tmp_path / "a.nii", saved(tmp_path / "b.nii", mask, affine), **how)
    (pool,) = source.pools
    sides = (4.0, 0.5, 0.75)
    assert pool.labels[SPACING][0, 0] == sides[axes[0]]
    assert any("data.plane=sagittal" in note for note in source.notes) == (plane != "sagittal")
    if plane == "sagittal":  # 16 x 16 pixels, which are not stretched
        np.testing.assert_array_equal(pool.labels[MASK], mask.transpose(axes))
        high = np.quantile(voxels, 0.99)
        grey = 255 * ((np.minimum(voxels, high) - voxels.min()) / (high - voxels.min()))
        np.testing.assert_array_equal(pool.images[..., 0], grey.astype(np.uint8).transpose(axes))
    assert len(pool.images) == mask.shape[axes[0]]


@pytest.mark.parametrize("padding", [-32768, -3024])
def test_a_window_gives_tissue_its_greys_and_padding_is_noted(tmp_path, padding):
    rng = np.random.default_rng(0)
    voxels = rng.integers(-100, 200, (16, 16, 6)).astype(np.int16)
    voxels[:3] = padding
    image, mask = saved(tmp_path / "a.nii", voxels), np.zeros_like(voxels, np.uint8)
    mask[5:9, 5:9] = 1
    mask = saved(tmp_path / "b.nii", mask)
    whole = source_of(image, mask, channels="repeated")
    assert len(np.unique(whole.pools[0].images)) < 30
    assert any("data.window" in note and "patient" in note for note in whole.notes)
    window = {"window": (-160.0, 240.0), "channels": "repeated"}
    source = source_of(image, mask, **window)
    assert not any("data.window" in note for note in source.notes)
    expected = np.clip((voxels.T.astype(np.int64) + 160) * 255 // 400, 0, 255)
    np.testing.assert_array_equal(source.pools[0].images[..., 0], expected)
    np.testing.assert_array_equal(slices_of(image, Slices(16, **window))[..., 0], expected)
    assert source.key != whole.key


def test_air_and_noise_are_no_padding(tmp_path):
    rng = np.random.default_rng(0)
    voxels = rng.integers(-100, 200, (16, 16, 6)).astype(np.int16)
    voxels[:3] = rng.integers(-1010, -990, (3, 16, 6))
    mask = np.zeros_like(voxels, np.uint8)
    mask[5:9, 5:9] = 1
    source = source_of(saved(tmp_path / "a.nii", voxels), saved(tmp_path / "b.nii", mask))
    assert not any("data.window" in note for note in source.notes)


@pytest.mark.parametrize("text", ["1", "240,-160", "1,1", "a,b", "1,2,3", "0,nan"])
def test_a_window_is_two_numbers_in_order(text):
    with pytest.raises(ConfigError, match=r"data\.window"):
        read("configs/masks.py", [("data.window", text)])


def test_the_keys_reach_the_slices_of_training_and_of_a_served_model(tmp_path):
    keys = [("data.window", "-160,240.5"), ("data.plane", "sagittal")]
    config = read("configs/masks.py", keys)
    assert GREYS.holds(config.data.window)
    slices = slices_in(config, {"masks": [MASK, SPACING, VOLUME]})
    assert (slices.plane, slices.window) == ("sagittal", (-160.0, 240.5))
    mask = scans.mask(labels=(1, 1))
    options = {"image_size": 16, "progress": False, "plane": "sagittal", "window": ("0", "500")}
    saved(tmp_path / "own/A/images/1.nii", scans.voxels())
    saved(tmp_path / "own/A/masks/1.nii", mask)
    saved(tmp_path / "prostate/HK/Case00.nii", scans.voxels())
    saved(tmp_path / "prostate/HK/Case00_segmentation.nii", mask)
    direct = source_of(
        tmp_path / "own/A/images/1.nii",
        tmp_path / "own/A/masks/1.nii",
        **options | {"window": (0.0, 500.0)},
    )
    loaded = load_mask_folders(tmp_path / "own", **options)
    published = load_prostate(tmp_path / "prostate", domains=("HK",), **options)
    for source in (loaded, published):
        np.testing.assert_array_equal(source.pools[0].images, direct.pools[0].images)


@pytest.mark.parametrize("almost", [0.9999999, 1.0004])
def test_labels_that_resampling_changed_a_little_are_those_labels(tmp_path, almost):
    labels = scans.mask(labels=(1, 1)).astype(np.float32) * np.float32(almost)
    image = saved(tmp_path / "a.nii", scans.voxels())
    (pool,) = source_of(image, saved(tmp_path / "b.nii", labels), image_size=16).pools
    (whole,) = source_of(image, saved(tmp_path / "c.nii", scans.mask(labels=(1, 1)))).pools
    np.testing.assert_array_equal(pool.labels[MASK], whole.labels[MASK])


@pytest.mark.parametrize(
    ("value", "shown"), [(0.5, "0.5"), (0.99, "0.99"), (256, "256"), (-1, "-1"), (np.nan, "nan")]
)
def test_other_labels_are_refused_with_their_value(tmp_path, value, shown):
    labels = scans.mask().astype(np.float32)
    labels[0, 0, 0] = value
    image, mask = saved(tmp_path / "a.nii", scans.voxels()), saved(tmp_path / "b.nii", labels)
    with pytest.raises(ValueError, match=rf"b\.nii .*value {shown};") as error:
        source_of(image, mask)
    assert str(mask) in str(error.value)


def test_a_flipped_bit_is_found_by_the_checksum_or_changes_nothing(tmp_path):
    path = saved(tmp_path / "a.nii.gz", scans.voxels())
    content, expected = path.read_bytes(), slices_of(path, Slices(16))
    refused = harmless = 0
    for bit in np.random.default_rng(0).choice(8 * len(content), 100, replace=False):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        try:
            found = slices_of(path, Slices(16))
        except ValueError as error:
            refused += str(path) in str(error)
        else:
            np.testing.assert_array_equal(found, expected)
            harmless += 1
    assert refused + harmless == 100
    assert refused > 90


def test_voxels_are_read_and_not_mapped(tmp_path, monkeypatch):
    """A mapped file that another program cuts while it is read ends the process by SIGBUS."""

    def refuse(*_, **__):
        raise AssertionError("mapped")

    image, mask = saved(tmp_path / "a.nii", scans.voxels()), saved(tmp_path / "b.nii", scans.mask())
    monkeypatch.setattr("mmap.mmap", refuse)
    assert len(source_of(image, mask).pools[0].images) == scans.SHAPE[2]


def test_classes_that_a_site_never_shows_are_noted(tmp_path):
    pairs = {}
    for name, labels in {"A": (1, 2), "B": (2, 2), "C": (1, 2)}.items():
        image = saved(tmp_path / f"{name}.nii", scans.voxels())
        mask = saved(tmp_path / f"{name}_mask.nii", scans.mask(labels=labels))
        pairs[name] = [Pair(image, mask, name)]
    slices = Slices(16, progress=False)
    classes = ("background", "disc", "cup")
    notes = volumes.to_source("x", tmp_path, pairs, slices, classes=classes).notes
    (note,) = (note for note in notes if "never show" in note)
    assert note.endswith("B (disc)")
    del pairs["B"]
    notes = volumes.to_source("x", tmp_path, pairs, slices, classes=classes).notes
    assert not any("never show" in note for note in notes)
