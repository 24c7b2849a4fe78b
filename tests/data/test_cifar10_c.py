"""CIFAR-10-C from tiny files of the published form."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedjax_bn.data.sets.cifar10_c import CORRUPTIONS, EXTRA, TYPES, load_cifar10_c

COUNT = 20
SOME = ("fog", "contrast")


def write_published(folder: Path, count: int = COUNT) -> Path:
    """Plain images: red shows the photograph, green the severity, blue the corruption."""
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(CORRUPTIONS):
        images = np.zeros((5, count, 32, 32, 3), np.uint8)
        images[..., 0] = np.arange(count)[:, None, None]
        images[..., 1] = np.arange(1, 6)[:, None, None, None]
        images[..., 2] = number
        np.save(folder / f"{name}.npy", images.reshape(-1, 32, 32, 3))
    np.save(folder / "labels.npy", np.tile(np.arange(count) % 10, 5).astype(np.uint8))
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    return write_published(tmp_path_factory.mktemp("c") / "CIFAR-10-C")


def load(path, **options):
    return load_cifar10_c(path, **options)


def test_published_images_keep_corruption_severity_label_and_photograph(published):
    source = load(published.parent, severities=(4, 2))
    assert [pool.name for pool in source.pools] == list(CORRUPTIONS)
    assert source.groups == {**TYPES, "extra": EXTRA}
    for pool in source.pools:
        assert pool.images.shape == (2 * COUNT, 32, 32, 3)
        red, green, blue = pool.images[:, 0, 0].T
        np.testing.assert_array_equal(green, np.repeat([2, 4], COUNT))
        np.testing.assert_array_equal(red, np.tile(np.arange(COUNT), 2))
        np.testing.assert_array_equal(blue, list(CORRUPTIONS).index(pool.name))
        np.testing.assert_array_equal(pool.labels, red % 10)
        # A photograph has one name in all domains and severities.
        assert pool.names[7] == pool.names[COUNT + 7] == "test/00007"
        assert len(set(pool.names)) == COUNT


@pytest.mark.parametrize("severities", [("3", "4", "5"), (1, 2, 3, 4, 5)])
def test_published_severities_in_a_row_stay_memory_mapped(published, severities):
    for pool in load(published, domains=SOME, severities=severities).pools:
        assert isinstance(pool.images, np.memmap)


def test_images_are_resized_by_pillow_and_kept_in_the_cache(published, tmp_path):
    source = load(published, domains=SOME, severities=(2,), image_size=48, cache=tmp_path)
    files = sorted(tmp_path.glob("*.npy"))
    assert len(files) == 2
    times = [file.stat().st_mtime_ns for file in files]
    again = load(published, domains=SOME, severities=(2,), image_size=48, cache=tmp_path)
    assert [file.stat().st_mtime_ns for file in sorted(tmp_path.glob("*.npy"))] == times
    original = np.load(published / "fog.npy")[COUNT + 3]
    expected = np.asarray(Image.fromarray(original).resize((48, 48), Image.BILINEAR))
    np.testing.assert_array_equal(source.pools[0].images[3], expected)
    np.testing.assert_array_equal(again.pools[0].images[3], expected)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("snow", b"no array"),
        ("frost", np.zeros((5 * COUNT, 32, 32, 3))),
        ("labels", np.full(5 * COUNT, 10)),
        ("labels", np.arange(5 * COUNT) % 7),
        ("labels", np.array([{}] * 5 * COUNT)),  # objects are pickles, which are not loaded
    ],
)
def test_a_damaged_file_is_named_whole(tmp_path, name, content):
    file = write_published(tmp_path / "c") / f"{name}.npy"
    file.write_bytes(content) if isinstance(content, bytes) else np.save(file, content)
    with pytest.raises(ValueError, match=str(file)):
        load(file.parent)


@pytest.mark.parametrize("options", [{"domains": ("fog", "fogg")}, {"severities": (0,)}])
def test_an_unknown_choice_is_refused(published, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        load(published, **options)
