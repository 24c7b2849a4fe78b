"""Copies that tensorflow-datasets has prepared are read without TensorFlow."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies, while they are imported
    tfds = pytest.importorskip("tensorflow_datasets", exc_type=ImportError)
    pytest.importorskip("array_record", exc_type=ImportError)

from fedjax_bn.data.sets.tfds_source import load_tfds
from fedjax_bn.data.source import TEST, TRAIN

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def write_copy(folder: Path, name: str, version: str, splits: dict, config: str = "") -> None:
    """A copy as tensorflow-datasets' builder of that name would leave it, of these examples."""

    class Copy(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """A builder of these examples."""

        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []
        pkg_dir_path = folder

        def _info(self):
            channels = len(next(iter(splits.values()))[0]["image"].getbands())
            features = {
                "image": tfds.features.Image(shape=(None, None, channels)),
                "label": tfds.features.ClassLabel(names=list("abcdefghij")),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {split: enumerate(examples) for split, examples in splits.items()}

        def _generate_examples(self):
            raise NotImplementedError

    Copy.name = name
    Copy(data_dir=folder, file_format="array_record").download_and_prepare()


def example(level: int, label: int, mode: str = "RGB") -> dict:
    colour = level if mode == "L" else (level, 0, 0)
    return {"image": Image.new(mode, (8, 8), colour), "label": label}


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    grey = {
        "train": [example(k, k % 10, "L") for k in range(12)],
        "test": [example(100 + k, k, "L") for k in range(10)],
    }
    write_copy(folder, "mnist", "3.0.1", grey)
    sizes = {"train": 11, "test": 10, "extra": 3}
    colour = {split: [example(k, k % 10) for k in range(n)] for split, n in sizes.items()}
    write_copy(folder, "svhn_cropped", "3.1.0", colour)
    for config in ("fog_2", "snow_2"):
        photographs = {"test": [example(k, k % 10) for k in range(30)]}
        write_copy(folder, "cifar10_corrupted", "1.0.0", photographs, config)
    return folder


def read(copies: Path, *domains: str, **how):
    return load_tfds(copies, domains=domains, image_size=8, progress=False, **how)


def test_a_domain_has_the_images_labels_and_parts_of_its_copy(copies):
    source = read(copies, "mnist", "svhn_cropped")
    mnist, svhn = source.pools
    levels = mnist.images[:, 0, 0, 0].astype(int)
    assert mnist.images.shape == (22, 8, 8, 3)
    assert source.classes == tuple("abcdefghij")
    np.testing.assert_array_equal(mnist.labels, levels % 10)
    np.testing.assert_array_equal(mnist.parts, np.where(levels < 100, TRAIN, TEST))
    assert len(set(mnist.names)) == 22
    assert len(svhn.labels) == 21  # without "extra"


def test_chosen_classes_are_numbered_in_their_order_and_cached(copies, tmp_path):
    source = read(copies, "svhn_cropped", classes=("c", "a"), cache=tmp_path)
    (pool,) = source.pools
    assert isinstance(pool.images, np.memmap)
    np.testing.assert_array_equal(pool.images[:, 0, 0, 0] % 10, np.where(pool.labels == 0, 2, 0))


def test_photographs_of_cifar10_c_have_one_name_in_all_domains(copies):
    fog, snow = read(copies, "cifar10_corrupted/fog_2", "cifar10_corrupted/snow_2").pools
    assert (fog.name, snow.name) == ("fog_2", "snow_2")
    np.testing.assert_array_equal(fog.names, snow.names)
    np.testing.assert_array_equal(fog.images, snow.images)


def test_reading_imports_no_tensorflow(copies):
    """In a process of its own: even where TensorFlow is installed, nothing imports it."""
    program = (
        "import sys\n"
        "from fedjax_bn.data.sets.tfds_source import load_tfds\n"
        "load_tfds(sys.argv[1], domains=('mnist',), image_size=8)\n"
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(copies)], check=True, capture_output=True)


def test_the_newest_version_is_read_and_another_format_refused(copies, tmp_path):
    new = tmp_path / "mnist" / "3.10.0"
    for version in (new, tmp_path / "mnist" / "3.9.0"):
        shutil.copytree(copies / "mnist" / "3.0.1", version)
    info = json.loads((new / "dataset_info.json").read_text())
    info |= {"fileFormat": "tfrecord", "version": "3.10.0"}
    (new / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"3\.10\.0"):
        read(tmp_path, "mnist")


@pytest.mark.parametrize("key", ["type", "pythonClassName", "python_class_name"])
def test_a_copy_that_names_code_of_others_is_not_opened(copies, tmp_path, monkeypatch, key):
    """tensorflow-datasets imports whatever module a prepared copy names."""
    shutil.copytree(copies / "mnist", tmp_path / "mnist")
    (tmp_path / "evil_features.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    content = {key: "evil_features.Image", "content": {}}
    path = tmp_path / "mnist" / "3.0.1" / "features.json"
    path.write_text(json.dumps({"featuresDict": {"features": {"image": content}}}))
    with pytest.raises(ValueError, match=r"evil_features\.Image"):
        read(tmp_path, "mnist")
    assert "evil_features" not in sys.modules


def test_a_missing_copy_or_class_and_too_large_images_are_named(copies, tmp_path):
    with pytest.raises(FileNotFoundError, match="tfds build mnist"):
        read(tmp_path, "mnist")
    with pytest.raises(ValueError, match=r"data\.domains"):
        read(tmp_path)
    with pytest.raises(ValueError, match="'cup'"):
        read(copies, "mnist", classes=("cup",))
    with pytest.raises(ValueError, match=r"max_megapixels"):
        read(copies, "mnist", max_megapixels=1e-6)
