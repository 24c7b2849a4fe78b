"""CIFAR-10-C from tiny files in the published form, and made from tiny CIFAR-10."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedjax_bn.data.corruptions import CORRUPTIONS, EXTRA, TYPES, corrupt
from fedjax_bn.data.sets import cifar10_c

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


def photographs(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def write_npz(path: Path, **changes) -> Path:
    labels = (np.arange(COUNT) % 10).astype(np.int32)
    arrays = {"test_images": photographs(COUNT), "test_labels": labels} | changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def write_batch(folder: Path, count: int = 6) -> Path:
    folder.mkdir()
    pixels = np.ascontiguousarray(photographs(count, 5).transpose(0, 3, 1, 2))
    content = {b"data": pixels.reshape(count, -1), b"labels": list(range(count))}
    (folder / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    return write_published(tmp_path_factory.mktemp("c") / "CIFAR-10-C")


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    return write_npz(tmp_path_factory.mktemp("z") / "cifar10.npz")


def load(path, **options):
    return cifar10_c.load(path, progress=False, **options)


def test_every_corruption_is_a_domain_and_types_are_groups(published):
    source = load(published)
    assert [pool.name for pool in source.pools] == list(CORRUPTIONS)
    assert source.groups == {**TYPES, "extra": EXTRA}
    assert source.classes[3] == "cat"
    assert "a reduced copy" in source.notes[0]


def test_published_images_keep_severity_label_and_photograph(published):
    for pool in load(published.parent, severities=(4, 2)).pools:
        assert pool.images.shape == (2 * COUNT, 32, 32, 3)
        red, green, blue = pool.images[:, 0, 0].T
        np.testing.assert_array_equal(green, np.repeat([2, 4], COUNT))
        np.testing.assert_array_equal(red, np.tile(np.arange(COUNT), 2))
        np.testing.assert_array_equal(blue, list(CORRUPTIONS).index(pool.name))
        np.testing.assert_array_equal(pool.labels, red % 10)
        assert pool.labels.dtype == np.int32


def test_a_photograph_has_one_name_in_all_domains_and_severities(published):
    for pool in load(published, corruptions=SOME, severities=(1, 5)).pools:
        assert pool.names[7] == pool.names[COUNT + 7] == "test/00007"
        assert len(set(pool.names)) == COUNT
        assert pool.parts is None


@pytest.mark.parametrize("severities", [(1,), ("3", "4", "5"), (1, 2, 3, 4, 5)])
def test_published_severities_in_a_row_stay_memory_mapped(published, severities):
    for pool in load(published, corruptions=SOME, severities=severities).pools:
        assert isinstance(pool.images, np.memmap)


def test_images_are_resized_by_pillow_and_kept_in_the_cache(published, tmp_path):
    source = load(published, corruptions=SOME, severities=(2,), image_size=48, cache=tmp_path)
    files = sorted(tmp_path.glob("*.npy"))
    assert len(files) == 2
    times = [file.stat().st_mtime_ns for file in files]
    again = load(published, corruptions=SOME, severities=(2,), image_size=48, cache=tmp_path)
    assert [file.stat().st_mtime_ns for file in sorted(tmp_path.glob("*.npy"))] == times
    original = np.load(published / "fog.npy")[COUNT + 3]
    expected = np.asarray(Image.fromarray(original).resize((48, 48), Image.BILINEAR))
    np.testing.assert_array_equal(source.pools[0].images[3], expected)
    np.testing.assert_array_equal(again.pools[0].images[3], expected)


def test_all_missing_published_files_are_named_at_once(tmp_path):
    folder = write_published(tmp_path / "c")
    for name in ("fog", "labels", "spatter"):
        (folder / f"{name}.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"labels\.npy, fog\.npy, spatter\.npy; .*zenodo"):
        load(folder)


def test_all_spoiled_published_files_are_named_at_once(tmp_path):
    folder = write_published(tmp_path / "c")
    raw = (folder / "fog.npy").read_bytes()
    (folder / "fog.npy").write_bytes(raw[:-100])
    (folder / "snow.npy").write_bytes(b"no array")
    np.save(folder / "frost.npy", np.zeros((5 * COUNT, 32, 32, 3)))
    np.save(folder / "zoom_blur.npy", np.zeros((3 * COUNT, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match=r"unusable are .*snow\.npy \(.*fog\.npy \(") as caught:
        load(folder)
    assert "frost.npy (float64" in str(caught.value)
    assert "zoom_blur.npy (uint8 (60, 32, 32, 3), not uint8 (100, 32, 32, 3)" in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (np.full(5 * COUNT, 10), "label 10 at index 0; labels must be whole numbers in 0..9"),
        (np.full(5 * COUNT, np.nan), "label nan at index 0"),
        (np.zeros(COUNT + 1, int), "21 labels, not five times as many as photographs"),
        (np.arange(5 * COUNT) % 7, "not the same photographs at each of five severities"),
    ],
)
def test_wrong_labels_are_refused_naming_the_fault(tmp_path, labels, sentence):
    folder = write_published(tmp_path / "c")
    np.save(folder / "labels.npy", labels)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load(folder)


def test_made_domains_are_the_corrupted_test_photographs(archive):
    source = load(archive, corruptions=SOME, severities=(1, 3), seed=5)
    with np.load(archive) as arrays:
        images, labels = arrays["test_images"], arrays["test_labels"]
    for pool in source.pools:
        assert pool.parts is None
        np.testing.assert_array_equal(pool.labels, np.tile(labels, 2))
        np.testing.assert_array_equal(pool.names[[0, COUNT]], ["test/00000"] * 2)
        for k, severity in enumerate((1, 3)):
            expected = corrupt(images, pool.name, severity, seed=5)
            np.testing.assert_array_equal(pool.images[k * COUNT : (k + 1) * COUNT], expected)


def test_made_images_are_kept_and_made_anew_for_another_seed(archive, tmp_path):
    options = {"corruptions": ("gaussian_noise",), "severities": (1,), "cache": tmp_path}
    first, again, other = (load(archive, seed=seed, **options) for seed in (0, 0, 1))
    assert len(list(tmp_path.glob("*.npy"))) == 2
    assert isinstance(first.pools[0].images, np.memmap)
    np.testing.assert_array_equal(first.pools[0].images, again.pools[0].images)
    assert (first.pools[0].images != other.pools[0].images).any()
    assert first.key == again.key != other.key


def test_the_original_batch_is_read_in_its_order(tmp_path):
    folder = write_batch(tmp_path / cifar10_c._FOLDER)
    for path in (tmp_path, folder):
        test, notes = cifar10_c._read_cifar10(path)
        np.testing.assert_array_equal(test.images, photographs(6, 5))
        np.testing.assert_array_equal(test.labels, np.arange(6))
        assert "has 6 test images of CIFAR-10's 10000" in notes[0]
    assert load(tmp_path, corruptions=SOME, severities=(1,)).pools[0].images.shape[0] == 6
    (folder / "test_batch").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks test_batch; .*kriz/cifar"):
        cifar10_c._read_cifar10(tmp_path)


class Evil:
    def __reduce__(self):
        return print, ("this must never run",)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({b"data": np.zeros((3, 3072), np.uint8)}, "cannot be read (KeyError"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 10]}, "label 10 at index 1"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "for 2 images"),
        ({b"data": Evil(), b"labels": [1]}, "it names __builtin__.print"),
        (b"no pickle", "cannot be read"),
        (
            pickle.dumps({b"data": b"\xe9"}, protocol=2).replace(b"latin1", b"utf-16"),
            "bytes are encoded as 'utf-16'",
        ),
    ],
)
def test_a_spoiled_batch_is_refused_naming_it_and_runs_no_code(tmp_path, content, sentence, capsys):
    folder = write_batch(tmp_path / cifar10_c._FOLDER)
    raw = content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)
    (folder / "test_batch").write_bytes(raw)
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        cifar10_c._read_cifar10(tmp_path)
    assert "test_batch" in str(caught.value)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"test_labels": None}, "lacks the arrays test_labels"),
        ({"test_images": np.zeros((3, 28, 28, 3), np.uint8)}, ": images are uint8 (3, 28, 28"),
        ({"test_labels": np.arange(COUNT)}, "label 10 at index 10"),
        ({"test_labels": np.arange(3)}, ": labels have shape (3,) for 20 images"),
    ],
)
def test_a_wrong_npz_is_refused_naming_the_array(tmp_path, changes, sentence):
    path = write_npz(tmp_path / "bad.npz", **changes)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load(path)


def test_what_is_no_cifar_says_what_to_fetch(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"has no CIFAR-10-C; .*zenodo.*cifar-10-batches-py"
    ):
        load(tmp_path)
    (tmp_path / "cut.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"cut\.npz is not a \.npz archive"):
        load(tmp_path / "cut.npz")


@pytest.mark.parametrize(
    "options",
    [
        {"corruptions": ("fogg",)},
        {"corruptions": ()},
        {"corruptions": ("fog", "fog")},
        {"severities": (0,)},
        {"severities": ("mild",)},
    ],
)
def test_an_unknown_choice_is_refused_with_what_is_allowed(archive, options):
    with pytest.raises(ValueError, match="choose one or more, each once, from"):
        load(archive, **options)


def test_corruptions_of_real_photographs_are_mild_at_severity_one(shared, tmp_path):
    path = shared / "data" / "cifar10_small.npz"
    source = load(path, corruptions=("contrast", "pixelate"), severities=(1,), cache=tmp_path)
    with np.load(path) as arrays:
        images = arrays["test_images"].astype(int)
    for pool in source.pools:
        assert pool.images.shape == (2000, 32, 32, 3)
        np.testing.assert_array_equal(np.bincount(pool.labels), 200)
        assert 0.5 < np.abs(pool.images - images).mean() < 15
