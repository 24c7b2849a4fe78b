"""tensorflow-datasets: copies by our builders and by its own, all without TensorFlow."""

import json
import re
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

from fedjax_bn.data.corruptions import CORRUPTIONS
from fedjax_bn.data.sets import image_folders, tfds_source
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION
from fedjax_bn.tfds.__main__ import main
from fedjax_bn.tfds.builders import BUILDERS

PACS = image_folders.IMAGE_FOLDERS["pacs"]
OFFICE = image_folders.IMAGE_FOLDERS["office_caltech10"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def write_images(root: Path, published, each: int = 2, size: int = 12) -> Path:
    """Plain images of every class in every domain; their grey level counts them."""
    number = 0
    for domain in published.domains:
        for one in published.classes:
            (root / domain / one).mkdir(parents=True)
            for k in range(each):
                image = Image.new("RGB", (size, size + 1), (number % 256,) * 3)
                image.save(root / domain / one / f"{k}.png")
                number += 1
    return root


def write_copy(folder: Path, name: str, version: str, splits: dict, config: str = "") -> None:
    """A copy as tensorflow-datasets' builder of that name would leave it, of these examples."""

    class Copy(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """A builder of these examples."""

        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []
        pkg_dir_path = folder

        def _info(self):
            example = next(iter(splits.values()))[0]
            channels = len(example["image"].getbands())
            features = {
                "image": tfds.features.Image(shape=(None, None, channels)),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
            if "id" in example:
                features["id"] = tfds.features.Text()
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {split: enumerate(examples) for split, examples in splits.items()}

        def _generate_examples(self):
            raise NotImplementedError

    Copy.name = name
    Copy(data_dir=folder, file_format="array_record").download_and_prepare()


def example(level: int, label: int, mode: str = "RGB", **more) -> dict:
    colour = level if mode == "L" else (level, 0, 0)
    return {"image": Image.new(mode, (8, 8), colour), "label": label, **more}


@pytest.fixture(scope="module")
def office(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of the images and of the prepared copy of Office-Caltech10."""
    images = tmp_path_factory.mktemp("office") / "office_caltech10"
    write_images(images, OFFICE)
    copies = tmp_path_factory.mktemp("copies")
    assert main(["office_caltech10", str(images), "--data_dir", str(copies)]) == 0
    return images, copies


def by_name(pool) -> dict:
    return {name: (pool.images[k].tobytes(), pool.labels[k]) for k, name in enumerate(pool.names)}


def test_our_copy_holds_what_the_folders_hold(office):
    images, copies = office
    direct = image_folders.load(OFFICE, images, image_size=10, progress=False)
    copy = tfds_source.load(copies, "office_caltech10", image_size=10, progress=False)
    assert copy.classes == direct.classes
    assert (copy.mean, copy.std) == (direct.mean, direct.std)
    assert [pool.name for pool in copy.pools] == [pool.name for pool in direct.pools]
    for one, two in zip(copy.pools, direct.pools, strict=True):
        assert one.parts is None
        assert by_name(one) == by_name(two)


def test_our_builders_are_known_to_tensorflow_datasets_and_read_by_data_source(office):
    assert set(BUILDERS) == set(tfds_source._OURS)
    source = tfds.data_source("office_caltech10", data_dir=office[1], split="dslr")
    assert len(source) == 20
    assert source[0]["image"].shape == (13, 12, 3)
    assert source[0]["name"].startswith(b"dslr/")


def test_preparing_and_reading_import_no_tensorflow(office, tmp_path):
    """In a process of its own: even where TensorFlow is installed, nothing imports it."""
    images, _ = office
    program = (
        "import sys\n"
        "from fedjax_bn.tfds.__main__ import main\n"
        "from fedjax_bn.data.sets import tfds_source\n"
        "name, images, copies = 'office_caltech10', *sys.argv[1:]\n"
        "assert main([name, images, '--data_dir', copies]) == 0\n"
        "s = tfds_source.load(copies, name, image_size=8)\n"
        "assert len(s.pools) == 4\n"
        "assert 'tensorflow' not in sys.modules"
    )
    command = [sys.executable, "-c", program, str(images), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)


def test_official_parts_classes_and_domains_come_through_a_copy(tmp_path):
    images = write_images(tmp_path / "pacs", PACS)
    lists = images / "splits"
    lists.mkdir()
    for domain in PACS.domains:
        lines = [
            [f"{domain}/{one}/{k}.png {label}" for label, one in enumerate(PACS.classes, 1)]
            for k in range(2)
        ]
        for part, own in zip(("train", "crossval"), lines, strict=True):
            (lists / f"{domain}_{part}_kfold.txt").write_text("\n".join(own))
    assert main(["pacs", str(images), "--data_dir", str(tmp_path / "copies")]) == 0
    source = tfds_source.load(
        tmp_path / "copies",
        "pacs",
        image_size=8,
        domains=("sketch", "photo"),
        classes=("person", "dog"),
        cache=tmp_path / "cache",
        progress=False,
    )
    assert [pool.name for pool in source.pools] == ["sketch", "photo"]
    assert source.classes == ("person", "dog")
    for pool in source.pools:
        assert isinstance(pool.images, np.memmap)
        assert {name.split("/")[1] for name in pool.names[pool.labels == 0]} == {"person"}
        parts = {f"{k}.png": part for k, part in enumerate((TRAIN, VALIDATION))}
        assert [parts[name.split("/")[2]] for name in pool.names] == pool.parts.tolist()


def test_a_copy_keeps_files_that_are_no_rgb_as_png_and_their_orientation(tmp_path):
    images = write_images(tmp_path / "office", OFFICE, each=1)
    exif = Image.Exif()
    exif[274] = 6
    grey = np.zeros((8, 8), np.uint8)
    grey[:, :4] = 255  # upright: the upper half
    for one in ("mug", "mouse"):
        (images / "dslr" / one / "0.png").unlink()
    Image.new("CMYK", (9, 9), (0, 255, 255, 0)).save(images / "dslr" / "mug" / "0.jpg")
    Image.fromarray(grey).save(images / "dslr" / "mouse" / "0.jpg", exif=exif)
    copies = tmp_path / "copies"
    assert main(["office_caltech10", str(images), "--data_dir", str(copies)]) == 0
    source = tfds.data_source("office_caltech10", data_dir=copies, split="dslr")
    mug = next(one for one in source if one["name"] == b"dslr/mug/0.jpg")
    assert mug["image"].shape == (9, 9, 3)
    assert mug["image"][0, 0, 0] > 200 > mug["image"][0, 0, 1]
    chosen = {"domains": ("dslr",), "classes": ("mouse",), "cache": tmp_path / "cache"}
    for orientation, white in {"upright": np.s_[:4], "stored": np.s_[:, :4]}.items():
        how = {**chosen, "progress": False, "orientation": orientation}
        source = tfds_source.load(copies, "office_caltech10", image_size=8, **how)
        assert source.pools[0].images[0][white].min() > 240
        assert any(note.startswith("dslr: images") for note in source.notes)


def test_unreadable_images_are_all_named_and_nothing_is_prepared(tmp_path, capsys):
    images = write_images(tmp_path / "office", OFFICE, each=1)
    for domain in ("amazon", "webcam"):
        (images / domain / "mug" / "0.png").write_bytes(b"\x89PNG")
    assert main(["office_caltech10", str(images), "--data_dir", str(tmp_path / "copies")]) == 1
    assert re.search(r"amazon/mug/0\.png .*webcam/mug/0\.png", capsys.readouterr().err)
    assert not list((tmp_path / "copies").rglob("*.array_record*"))


def test_mnist_and_svhn_come_from_their_copies_with_their_parts(tmp_path):
    grey = {
        "train": [example(k, k % 10, "L") for k in range(12)],
        "test": [example(100 + k, k, "L") for k in range(10)],
    }
    write_copy(tmp_path, "mnist", "3.0.1", grey)
    colour = {
        split: [example(k, k % 10, id=f"{split}_{k:06}") for k in range(count)]
        for split, count in (("train", 11), ("test", 10), ("extra", 3))
    }
    write_copy(tmp_path, "svhn_cropped", "3.1.0", colour)
    source = tfds_source.load(tmp_path, "digits", image_size=28, download=False, progress=False)
    mnist, svhn = source.pools
    assert mnist.images.shape == (22, 28, 28, 3)
    levels = mnist.images[:, 0, 0, 0].astype(int)
    np.testing.assert_array_equal(mnist.labels, levels % 10)
    np.testing.assert_array_equal(mnist.parts, np.where(levels < 100, TRAIN, TEST))
    assert mnist.names[0] == "mnist/train/00000"
    assert len(svhn.labels) == 21  # without "extra"
    number = [int(name.rsplit("_", 1)[1]) for name in svhn.names]
    np.testing.assert_array_equal(svhn.images[:, 0, 0, 0], number)


def test_photographs_of_cifar10_c_have_one_name_in_all_domains(tmp_path):
    names = ("glass_blur", "fog")
    for shown in ("frosted_glass_blur", "fog"):
        examples = [example(k, k % 10) for k in range(30)]
        write_copy(tmp_path, "cifar10_corrupted", "1.0.0", {"test": examples}, f"{shown}_2")
    options = {"image_size": 8, "download": False, "progress": False}
    one, two = tfds_source.load(tmp_path, "cifar10_c/2", domains=names, **options).pools
    np.testing.assert_array_equal(one.names, two.names)
    np.testing.assert_array_equal(one.images, two.images)
    with pytest.raises(FileNotFoundError, match="gaussian_noise_2 has no prepared copy"):
        tfds_source.load(tmp_path, "cifar10_c/2", **options)


def test_all_corruptions_have_a_builder_of_their_name():
    from tensorflow_datasets.image_classification import cifar10_corrupted

    theirs = {config.name for config in cifar10_corrupted.Cifar10Corrupted.BUILDER_CONFIGS}
    ours = {
        copy.builder.removeprefix("cifar10_corrupted/")
        for severity in range(1, 6)
        for copy in tfds_source._copies_of("cifar10_c", (), str(severity))
    }
    assert ours == theirs
    assert len(ours) == 5 * len(CORRUPTIONS)


def test_the_newest_version_is_read_and_another_format_refused(office, tmp_path):
    copies = tmp_path / "copies"
    shutil.copytree(office[1], copies)
    old = copies / "office_caltech10" / "1.0.0"
    new = copies / "office_caltech10" / "1.10.0"
    shutil.copytree(old, new)
    (copies / "office_caltech10" / "1.9.0").mkdir()
    info = json.loads((new / "dataset_info.json").read_text())
    info |= {"fileFormat": "tfrecord", "version": "1.10.0"}
    (new / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"1\.10\.0 is in the format tfrecord"):
        tfds_source.load(copies, "office_caltech10", image_size=8)


def test_a_copy_that_names_code_of_others_is_not_opened(office, tmp_path, monkeypatch):
    """tensorflow-datasets imports whatever module a prepared copy names."""
    copies = tmp_path / "copies"
    shutil.copytree(office[1], copies)
    (tmp_path / "evil_features.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    path = copies / "office_caltech10" / "1.0.0" / "features.json"
    for key in ("type", "pythonClassName", "python_class_name"):
        content = {key: "evil_features.Image", "content": {}}
        path.write_text(json.dumps({"featuresDict": {"features": {"image": content}}}))
        with pytest.raises(ValueError, match=r"names the code 'evil_features.Image', which is not"):
            tfds_source.load(copies, "office_caltech10", image_size=8)
    assert "evil_features" not in sys.modules


def test_a_missing_copy_of_ours_says_how_to_prepare_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"python -m fedjax_bn\.tfds vlcs FOLDER_OF_THE"):
        tfds_source.load(tmp_path, "vlcs", image_size=8)


def test_a_copy_that_cannot_be_made_says_why_and_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_source, "_PREPARE", "raise OSError('no connection')")
    with pytest.raises(FileNotFoundError, match=r"OSError: no connection.*tfds build mnist"):
        tfds_source.load(tmp_path, "digits", image_size=8)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("pac", {}, "'pac' is not a dataset here; choose from digits"),
        ("office_caltech10", {"domains": ("amazone",)}, "no domains ['amazone']; it has amazon"),
        ("office_caltech10", {"classes": ("cup",)}, "no classes ['cup']; it has back_pack"),
        ("cifar10_c/0", {}, "severity is 0"),
        ("pacs/2", {}, "'pacs/2' is not a dataset here"),
    ],
)
def test_an_unknown_choice_is_refused_with_what_there_is(office, name, options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        tfds_source.load(office[1], name, image_size=8, download=False, **options)


def test_the_limit_on_an_image_is_that_of_the_configuration(office):
    with pytest.raises(ValueError, match=r"more than the 1e-06 megapixels of data\.max_megapixels"):
        tfds_source.load(office[1], "office_caltech10", image_size=8, max_megapixels=1e-6)
