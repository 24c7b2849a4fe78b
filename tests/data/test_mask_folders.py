"""Folders of images with masks as people have them, and the vessels of four cameras."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import scans
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.division.clients import make_clients
from fedjax_bn.data.domain import check_dataset, splits, whole
from fedjax_bn.data.labels import MASK, VOLUME
from fedjax_bn.data.masks.mask_folders import load_mask_folders
from fedjax_bn.data.sets import npz
from fedjax_bn.data.source import TEST, TRAIN
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.build import build

HOW = {"image_size": 8, "progress": False}
NAMED = {
    "DRIVE": ("images/{}_training.tif", "masks/{}_manual1.gif", 15),
    "STARE": ("images/{}.ppm", "masks/{}.ah.pgm", 12),
    "CHASEDB": ("images/{}.jpg", "masks/{}_1stHO.png", 24),
    "VEVIO": ("images/{}.png", "masks/bw_{}_black.png", 16),
}
PATTERNS = tuple(pattern for *patterns, _ in NAMED.values() for pattern in patterns)


def image(path: Path, width: int = 8, height: int = 8, **how) -> Path:
    """An image whose red channel rises to the right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.arange(width)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **how)
    return path


def mask(path: Path, width: int = 8, height: int = 8, value: int = 255) -> Path:
    """A mask whose left half has a value."""
    values = np.zeros((height, width), np.uint8)
    values[:, : width // 2] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


def written(root: Path, images: str, masks: str, numbers=range(1, 13)) -> None:
    """Images and masks of numbers in the place of {}."""
    for number in numbers:
        image(root / images.format(number))
        mask(root / masks.format(number))


@pytest.mark.parametrize(
    ("images", "masks", "patterns"),
    [
        ("Images/{}.jpg", "Masks/{}.gif", ()),
        ("images/train/{}.png", "masks/train/{}.png", ()),
        ("train/images/{}.png", "train/masks/{}.bmp", ()),
        ("images/{}_training.tif", "masks/{}_manual1.gif", ("images/{}_t*", "masks/{}_manual1.*")),
        ("{}/image.png", "{}/mask.png", ("{}/image.png", "{}/mask.png")),
        ("x{}.png", "y{}.png", ("none/{}.png", "none/{}.gif", "x{}.*", "y{}.*")),
    ],
)
def test_masks_have_the_names_of_their_images_or_patterns(tmp_path, images, masks, patterns):
    written(tmp_path / "a", images, masks)
    mask(tmp_path / "a/fov/1.png")
    (pool,) = load_mask_folders(tmp_path, pairs=patterns, **HOW).pools
    assert pool.name == "a"
    assert (pool.labels[MASK] == [1] * 4 + [0] * 4).all()
    assert pool.names.tolist() == sorted(f"a/{images.format(k)}" for k in range(1, 13))


def test_a_folder_of_images_and_masks_is_one_domain_and_its_parts_are_official(tmp_path):
    written(tmp_path / "eyes", "train/images/{}.png", "train/masks/{}.png", range(4))
    written(tmp_path / "eyes", "test/images/{}.png", "test/Masks/{}.png", range(3))
    (pool,) = load_mask_folders(tmp_path / "eyes", **HOW).pools
    assert pool.name == "eyes"
    assert sorted(pool.parts.tolist()) == [TRAIN] * 4 + [TEST] * 3
    written(tmp_path / "eyes", "images/{}.png", "masks/{}.png", ["more"])
    assert load_mask_folders(tmp_path / "eyes", **HOW).pools[0].parts is None
    written(tmp_path / "in", "train/a/images/{}.png", "train/a/masks/{}.png", [1])
    with pytest.raises(ValueError, match="in/train/a "):
        load_mask_folders(tmp_path / "in", **HOW)


def test_sides_of_one_person_share_a_name_and_a_pattern_names_other_groups(tmp_path):
    names = ("p1_L", "p1_R", "p2_left", "p2_right", "p3_OD_1", "p3_OS_1", "p4_L", "leftover")
    written(tmp_path, "a/train/images/{}.png", "a/train/masks/{}.png", names[1:])
    written(tmp_path, "a/test/images/{}.png", "a/test/masks/{}.png", names[:1])
    source = load_mask_folders(tmp_path, **HOW)
    names = [Path(name).name.removesuffix(".png") for name in source.pools[0].names]
    assert sorted(names) == ["leftover", "p1_*", "p1_*", "p2_*", "p2_*", "p3_*_1", "p3_*_1", "p4_L"]
    assert "data.groups" in " ".join(source.notes)
    (pool,) = load_mask_folders(tmp_path, groups=r"(p)\d|left", **HOW).pools
    assert sorted(set(pool.names)) == ["a/None", "a/p"]


def test_tiles_show_images_at_their_own_resolution(tmp_path, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    image(tmp_path / "a/images/large.png", 20, 11)
    mask(tmp_path / "a/masks/large.png", 20, 11)
    image(tmp_path / "a/images/small.png", 4, 8)
    mask(tmp_path / "a/masks/small.png", 4, 8)
    (pool,) = load_mask_folders(tmp_path, large="tiles", cache=cache, **HOW).pools
    masks = pool.labels[MASK]
    assert pool.images.shape == (7, 8, 8, 3)
    assert pool.labels[VOLUME].tolist() == [0] * 6 + [1]
    assert pool.names.tolist() == ["a/images/large.png"] * 6 + ["a/images/small.png"]
    for tile, left in zip(pool.images, (0, 8, 12, 0, 8, 12), strict=False):
        assert (tile[:, :, 0] == np.arange(left, left + 8)).all()
    labelled = masks != UNLABELLED
    assert labelled.sum((1, 2)).tolist() == [64, 64, 32, 24, 24, 12, 32]
    assert (masks == 1).sum() == 10 * 11 + 2 * 8
    assert pool.images[6, 0, :, 0].tolist() == [0, 1, 2, 3, 3, 3, 3, 3]  # its edge is repeated
    source = load_mask_folders(tmp_path, large="tiles", cache=cache, **HOW)
    assert np.array_equal(source.pools[0].labels[MASK], masks)
    check_dataset(make_clients(source)[0])


def test_an_image_and_its_mask_are_turned_alike(tmp_path):
    exif = Image.Exif()
    exif[274] = 6  # turn by 90 degrees to the right
    image(tmp_path / "a/images/1.png", 12, 8, exif=exif)
    mask(tmp_path / "a/masks/1.png", 8, 12)
    source = load_mask_folders(tmp_path, **HOW)
    assert (np.diff(source.pools[0].images[0, :, 0, 0].astype(int)) > 0).all()  # rises downwards
    assert "EXIF orientation: 1" in " ".join(source.notes)
    with pytest.raises(ValueError, match=r"masks/1\.png .*data\.orientation"):
        load_mask_folders(tmp_path, orientation="stored", **HOW)


BAD = {  # change of a folder -> what the error names
    "no masks": (lambda a: shutil.rmtree(a / "masks"), ["a/images/1.png", "data.pairs"]),
    "nothing": (shutil.rmtree, ["data.path"]),
    "two masks": (lambda a: mask(a / "masks/1.gif"), ["a/masks/1.gif", "a/masks/1.png"]),
    "another size": (lambda a: mask(a / "masks/1.png", 8, 9), ["a/masks/1.png", "a/images/1.png"]),
    "a damaged mask": (lambda a: (a / "masks/1.png").write_bytes(b"\x89PNG"), ["a/masks/1.png"]),
    "a damaged image": (lambda a: (a / "images/1.png").write_bytes(b"GIF"), ["a/images/1.png"]),
    "a value": (lambda a: mask(a / "masks/1.png", value=9), ["a/masks/1.png", "9", "data.classes"]),
    "colours": (lambda a: image(a / "masks/1.png"), ["a/masks/1.png", "RGB"]),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named_on_one_line(tmp_path, name):
    written(tmp_path, "a/images/{}.png", "a/masks/{}.png", [1, 2])
    change, culprits = BAD[name]
    change(tmp_path / "a")
    with pytest.raises((ValueError, FileNotFoundError), match=r"\A.*\Z") as caught:
        load_mask_folders(tmp_path, classes=("rest", "cell"), **HOW)
    assert all(culprit in str(caught.value) for culprit in culprits)


def test_a_folder_or_domain_that_does_not_exist_and_a_pattern_that_fits_two_are_named(tmp_path):
    written(tmp_path, "a/images/{}.png", "a/masks/{}.png", [1, 2])
    for path, domains in ((tmp_path, ("b",)), (tmp_path / "none", ()), (None, ())):
        with pytest.raises(FileNotFoundError, match=r"data\.path"):
            load_mask_folders(path, domains=domains, **HOW)
    assert [p.name for p in load_mask_folders(tmp_path, domains=("a",), **HOW).pools] == ["a"]
    image(tmp_path / "a/images/1.jpg")
    for pairs in (("images/{}.*", "masks/{}.png"), ("x{}", "y{}")):
        with pytest.raises(ValueError, match=r"/a.*data\.pairs"):
            load_mask_folders(tmp_path, pairs=pairs, **HOW)


@pytest.fixture(scope="module")
def vessels(shared) -> Path:
    folder = shared / "data/segmentation/vessels"
    if not folder.is_dir():
        pytest.skip(f"no vessels at {folder}")
    return folder


@pytest.fixture(scope="module")
def read_vessels(vessels):
    return load_mask_folders(vessels, image_size=64, progress=False, pairs=PATTERNS)


def opened(path, mode, filter=Image.Resampling.NEAREST):
    with Image.open(path) as image:
        return np.asarray(image.convert(mode).resize((64, 64), filter))


def test_the_vessels_of_four_cameras_are_read_as_they_are(vessels, read_vessels):
    """Against Pillow, with the names of the files written down here."""
    assert read_vessels.classes == ("background", "foreground")
    for pool in read_vessels.pools:
        images, masks, count = NAMED[pool.name]
        before, after = images.removeprefix("images/").split("{}")
        files = sorted((vessels / pool.name / "images").iterdir())
        assert len(pool.images) == len(files) == count
        for k in range(0, count, 4):
            name = files[k].name.removeprefix(before).removesuffix(after)
            small = opened(files[k], "RGB", Image.Resampling.BILINEAR)
            small_mask = opened(vessels / pool.name / masks.format(name), "L")
            assert np.array_equal(pool.labels[MASK][k], small_mask > 0)
            assert np.array_equal(pool.images[k], small)


def test_the_eyes_of_one_child_are_never_in_two_splits(read_vessels):
    dataset, (drive,) = make_clients(read_vessels, target="DRIVE", validation=0.2, test=0.2, seed=1)
    assert len(drive.test.images) == 15
    (eyes,) = [domain for domain in dataset.domains if domain.name == "CHASEDB"]
    children = [set(split.names) for _, split in splits(eyes)]
    assert sum(map(len, children)) == len(set.union(*children)) == 12


def test_volumes_of_nifti_are_read_as_scans_whose_slices_stay_together(tmp_path):
    pytest.importorskip("nibabel")
    voxels = np.zeros((8, 8, 3), np.uint8)
    voxels[:4] = 1
    for name in ("p1", "p2_L", "p2_R"):
        scans.write_volume(tmp_path / f"a/images/{name}.nii.gz", 100 * voxels)
        scans.write_volume(tmp_path / f"a/masks/{name}.nii.gz", voxels)
    (pool,) = load_mask_folders(tmp_path, **HOW).pools
    assert pool.labels[VOLUME].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert (pool.labels[MASK] == [1] * 4 + [0] * 4).all()
    assert pool.names.tolist() == ["a/images/p1.nii.gz"] * 3 + ["a/images/p2_*.nii"] * 6
    written(tmp_path / "b", "images/{}.png", "masks/{}.png", [1])
    with pytest.raises(ValueError, match=r"p1\.nii\.gz"):
        load_mask_folders(tmp_path, **HOW)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("pairs", "images/{}.png"), ("groups", "("), ("large", "crop")),
        *(("window", "1"), ("window", "240,-160"), ("window", "a,b")),
    ],
)
def test_a_key_that_cannot_be_meant_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"config\.data\.{key}"):
        read("configs/masks.py", [(f"data.{key}", value)])


def test_the_configuration_reads_a_folder_with_all_keys_of_masks(tmp_path):
    written(tmp_path / "in", "a/x/p{}.png", "a/y/p{}.png")
    changes = {"path": f"{tmp_path}/in", "cache": f"{tmp_path}/cache", "image_size": "16"}
    changes |= {"pairs": "x/{}.png,y/{}.png", "groups": r"p\d", "large": "tiles"}
    changes |= {"classes": "no,yes"}
    config = read("configs/masks.py", [(f"data.{key}", value) for key, value in changes.items()])
    built = build(config)
    (domain,) = built.internal.domains
    assert built.internal.classes == ("no", "yes")
    assert set(whole(domain).names) == {f"a/p{digit}" for digit in range(1, 10)}
    assert domain.train.labels[MASK].shape[1:] == (16, 16)


def test_masks_in_an_archive_are_renumbered_by_name_and_black_and_white_ones_are_refused(tmp_path):
    path = tmp_path / "own.npz"
    images = np.zeros((2, 8, 8, 3), np.uint8)
    masks = np.random.default_rng(0).choice(np.array([0, 1, 2, 255], np.uint8), (2, 8, 8))
    np.savez(path, a__images=images, a__labels=masks, classes=np.array(["rest", "disc", "cup"]))
    source = npz.load_npz(path, classes=("rest", "cup", "disc"))
    assert source.classes == ("rest", "cup", "disc")
    table = np.arange(256)
    table[[1, 2]] = 2, 1
    assert np.array_equal(source.pools[0].labels[MASK], table[masks])
    for wrong in (np.uint8(255) * (masks == 1), masks[:, :4]):
        np.savez(path, a__images=images, a__labels=wrong)
        with pytest.raises(ValueError, match=r"own\.npz|a__labels"):
            npz.load_npz(path)
