"""A run on masks, end to end: train, resume, evaluate, serve and predict."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import runs
import square_masks
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.data.domain import form_of, whole
from fedjax_bn.engine.images import standardize
from fedjax_bn.models import UNet
from fedjax_bn.run.files import finished_run
from fedjax_bn.serving import folder as served_folder
from fedjax_bn.serving import load, predict
from fedjax_bn.serving.predictor import Predictor
from fedjax_bn.task import segmentation

DATA = square_masks.dataset()
KEYS = {"model": "UNet:width=2:levels=1", "data__image_size": square_masks.SIDE, "target": "c"}
KEYS |= {"rounds": 2, "eval_every": 1, "batch_size": 4, "adaptations": ("tsmobn",)}
KEYS |= {"adapt_batch_size": 4, "checkpoint_every": 1}
UNSEEN = whole(DATA.domains[2])


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    place = tmp_path_factory.mktemp("masks") / "run"
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch, DATA)
        summary = runs.run(place, **KEYS)
    return place, summary


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A served model that was not trained."""
    place = tmp_path_factory.mktemp("masks") / "served"
    model = UNet(num_classes=3, width=2, levels=1)
    form = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda x: rng.uniform(0.1, 1, x.shape).astype(x.dtype), form)
    asked = about("resize", classes=list(square_masks.CLASSES), shape=list(UNSEEN.images.shape[1:]))
    facts = asked._replace(
        **{"form": served_folder.FORM, "library": "", "model": KEYS["model"], "method": "fedbn"},
        **{"compute_dtype": "float32", "dataset": "squares", "round": 1, "dtype": "uint8"},
        **{"mean": [0.4], "std": [0.3], "adaptations": ["tsmobn"], "batch_size": 4},
        **{"channels": "", "programs": {}},
    )
    served_folder.write_served(place, facts, variables, {})
    return place


def about(masks, **more):
    fields = {"classes": ["background", "light"], "shape": [16, 16, 3], "masks": masks}
    fields |= {"orientation": "upright", "crop": 0, "plane": "axial", "window": [], "client": ""}
    return served_folder.About(**dict.fromkeys(served_folder.About._fields) | fields | more)


@pytest.mark.slow
def test_a_served_model_gives_the_dice_of_its_run(workdir, tmp_path):
    place, summary = workdir
    served = tmp_path / "served"
    assert runs.command("serve", "--workdir", str(place), "--export", str(served)) == 0
    assert summary["score"] == "Dice"
    form = finished_run.read_about(place)["form"]
    assert form["masks"] == ["mask"] == form_of(DATA)["masks"]
    found = load(served)(UNSEEN.images)
    assert found.shape == (13, 16, 16, 3)
    dice = segmentation(3).score(found, UNSEEN.labels)
    assert dice == pytest.approx(summary["accuracy"]["unseen"]["c"]["tsmobn"], abs=1e-3)


@pytest.mark.slow
def test_evaluate_scores_an_archive_of_masks(workdir, tmp_path, capfd):
    place, _ = workdir
    path = tmp_path / "new.npz"
    np.savez(path, c__images=UNSEEN.images, c__labels=UNSEEN.labels["mask"])
    given = [f"--workdir={place}", "--config.data.name=npz", f"--config.data.path={path}"]
    assert runs.command("evaluate", *given, "--config.adaptations=tsmobn:order=-1") == 0
    found = json.loads((place / "evaluations" / "evaluation.json").read_text())
    assert (found["score"], found["samples"]) == ("Dice", {"c": 13})
    assert 0 < found["unseen"]["c"]["tsmobn:order=-1"] <= 100
    np.savez(path, c__images=UNSEEN.images, c__labels=np.zeros(13, int), classes=DATA.classes)
    assert runs.command("evaluate", *given) == 2
    assert "masks each" in capfd.readouterr().err


def write_images(folder, images):
    for number, image in enumerate(images):
        path = folder / f"part{number % 2}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def test_predict_writes_a_mask_for_each_image_and_the_areas(served, tmp_path):
    write_images(tmp_path / "images", UNSEEN.images)
    out = tmp_path / "out"
    given = ("--model", str(served), "--data", str(tmp_path / "images"), "--out", str(out))
    assert runs.command("predict", *given) == 0
    order = np.argsort([f"part{number % 2}/{number:02}" for number in range(13)])
    found = load(served)(UNSEEN.images[order]).argmax(-1)
    rows = list(csv.DictReader((out / "areas.csv").read_text().splitlines()))
    assert len(rows) == 13 * 3
    for place, number in enumerate(order):
        mask = Image.open(out / f"part{number % 2}" / f"{number:02}.png")
        assert mask.mode == "P"
        np.testing.assert_array_equal(np.asarray(mask), found[place])
        own = rows[3 * place : 3 * place + 3]
        assert {row["image"] for row in own} == {f"part{number % 2}/{number:02}.png"}
        assert [row["class"] for row in own] == list(square_masks.CLASSES)
        counts = np.bincount(found[place].ravel(), minlength=3)
        assert [int(row["pixels"]) for row in own] == counts.tolist()
        assert float(own[1]["share"]) == pytest.approx(counts[1] / 256)
    assert len([*out.rglob("*.*")]) == 14
    np.savez(tmp_path / "images.npz", images=UNSEEN.images[order])
    out = tmp_path / "of archive"
    given = ("--model", str(served), "--data", str(tmp_path / "images.npz"), "--out", str(out))
    assert runs.command("predict", *given) == 0
    np.testing.assert_array_equal(np.load(out / "masks.npz")["masks"], found)
    assert sorted(path.name for path in out.iterdir()) == ["areas.csv", "masks.npz"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"out": ""}, "--out"),
        ({"out": "{images}"}, "--out"),
        ({"data": "-"}, "--data"),
        ({"data": "{twice}"}, "'a.png'"),
        ({"data": "{inside}"}, "'a.png/b.png'"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(served, tmp_path, capfd, changes, said):
    write_images(tmp_path / "images", UNSEEN.images[:2])
    for name in ("twice/a.png", "twice/a.bmp", "inside/a.jpg", "inside/a.png/b.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(UNSEEN.images[0]).save(path)
    places = {name: tmp_path / name for name in ("images", "twice", "inside")}
    before = sorted(tmp_path.rglob("*"))
    flags = {"model": str(served), "data": str(tmp_path / "images"), "out": str(tmp_path / "out")}
    given = [f"--{key}={text.format(**places)}" for key, text in (flags | changes).items()]
    assert runs.command("predict", *given) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line
    assert sorted(tmp_path.rglob("*")) == before


class Brightness:
    """A predictor whose probability of class 1 is each pixel's second channel, 0 to 1."""

    def blocks(self, count, read):
        for start in range(0, count, 3):
            index = np.arange(start, min(start + 3, count))[::-1]
            light = read(index)[..., 1] / np.float32(255)
            yield index, np.stack([1 - light, light], -1)


@pytest.fixture
def write_bright(tmp_path, monkeypatch):
    """Writes the masks that `Brightness` predicts of files, as a model of some facts would."""

    def write(data, out, masks, **facts):
        place = tmp_path / "model"
        place.mkdir(exist_ok=True)
        asked = about(masks, form=served_folder.FORM, **facts)
        (place / "model.json").write_text(json.dumps(asked._asdict()))
        predict.run(str(place), str(data), out=str(out))

    monkeypatch.setattr(predict, "load", lambda *given, **more: Brightness())
    return write


def test_tiles_are_put_together_and_a_stretched_image_gets_its_size_back(tmp_path, write_bright):
    shapes = [(16, 16), (40, 23), (9, 60), (33, 16)]
    rng = np.random.default_rng(0)

    def masks_of(images, kind):
        write_images(tmp_path / kind, images)
        write_bright(tmp_path / kind, tmp_path / f"masks {kind}", kind)
        for number in range(len(images)):
            path = tmp_path / f"masks {kind}" / f"part{number % 2}" / f"{number:02}.png"
            yield np.asarray(Image.open(path))

    images = [rng.integers(0, 2, (*shape, 3), np.uint8) * 255 for shape in shapes]
    for image, mask in zip(images, masks_of(images, "tiles"), strict=True):
        np.testing.assert_array_equal(mask, image[..., 1])
    images = [np.zeros((*shape, 3), np.uint8) for shape in shapes]
    for image in images:
        image[:, image.shape[1] // 3 :] = 255
    for image, mask in zip(images, masks_of(images, "resize"), strict=True):
        assert mask.shape == image.shape[:2]
        edge = np.abs(np.arange(mask.shape[1]) + 0.5 - mask.shape[1] // 3)
        far = edge > mask.shape[1] / 16  # a pixel of the stretched image
        np.testing.assert_array_equal(mask[:, far], image[:, far, 0])


def test_an_image_that_exif_turns_has_a_mask_as_viewers_show_it(tmp_path, write_bright):
    image = np.zeros((16, 24, 3), np.uint8)
    image[:, :12] = 255  # the left half of the rows as stored
    exif = Image.Exif()
    exif[274] = 6  # turned by a quarter, clockwise
    Image.fromarray(image).save(tmp_path / "a.png", exif=exif)
    for orientation, turns in (("upright", -1), ("stored", 0)):
        out = tmp_path / orientation
        write_bright(tmp_path / "a.png", out, "tiles", orientation=orientation)
        np.testing.assert_array_equal(Image.open(out / "a.png"), np.rot90(image[..., 0], turns))


@pytest.mark.parametrize("crop", [0, 16])
def test_a_scan_gets_a_scan_of_masks_in_its_own_place(tmp_path, crop, write_bright):
    nibabel = pytest.importorskip("nibabel", reason="nibabel is not installed")
    voxels = np.zeros((24, 20, 5), np.int16)  # columns, rows, slices
    voxels[4:12, 6:14, 2] = voxels[8:16, 8:12, 3] = 900
    affine = np.diag([0.5, 0.8, 3.0, 1.0])
    affine[:3, 3] = 7, -9, 2
    path, out = tmp_path / "in" / "ward" / "case.nii.gz", tmp_path / "out"
    path.parent.mkdir(parents=True)
    volume = nibabel.Nifti1Image(voxels, affine)
    volume.header["descrip"], volume.header["cal_max"] = b"T2", 900
    volume.to_filename(path)
    write_bright(tmp_path / "in", out, "resize", channels="neighbours", crop=crop)
    mask = nibabel.load(out / "ward" / "case.nii.gz")
    np.testing.assert_allclose(mask.affine, affine)
    assert (mask.get_data_dtype(), bytes(mask.header["descrip"])[:2]) == (np.uint8, b"T2")
    assert float(mask.header["cal_max"]) == 0
    found = np.asarray(mask.dataobj)
    if crop:  # 16 pixels in the middle are neither stretched nor cut
        np.testing.assert_array_equal(found, voxels > 450)
    assert (found != (voxels > 450)).mean() < 0.02
    rows = (out / "areas.csv").read_text().splitlines()
    assert rows[0] == "image,class,pixels,share,ml"
    image, name, pixels, share, ml = rows[2].split(",")
    assert (image, name, int(pixels)) == ("ward/case.nii.gz", "light", found.sum())
    assert float(ml) == pytest.approx(found.sum() * 0.5 * 0.8 * 3 / 1000)
    assert float(share) == pytest.approx(found.mean(), rel=1e-5)


@pytest.mark.parametrize("codes", ["LPS", "PIR", "SLA"])
def test_a_mirrored_or_turned_scan_gets_the_same_mask_in_its_own_axes(
    tmp_path, codes, write_bright
):
    nibabel = pytest.importorskip("nibabel", reason="nibabel is not installed")
    from nibabel.orientations import axcodes2ornt

    noise = np.random.default_rng(1).integers(0, 900, (24, 20, 5)).astype(np.int16)
    affine = np.diag([0.5, 0.8, 3.0, 1.0])
    affine[:3, 3] = 7, -9, 2
    upright = nibabel.Nifti1Image(noise, affine)
    turned = upright.as_reoriented(axcodes2ornt(codes))  # exchanges and mirrors in any order
    masks, areas = {}, {}
    for name, volume in (("upright", upright), ("turned", turned)):
        volume.to_filename(tmp_path / f"{name}.nii")
        path, out = tmp_path / f"{name}.nii", tmp_path / name
        write_bright(path, out, "resize", channels="neighbours")
        masks[name] = nibabel.load(tmp_path / name / f"{name}.nii")
        areas[name] = (tmp_path / name / "areas.csv").read_text().replace(name, "")
    assert masks["turned"].shape == turned.shape
    np.testing.assert_allclose(masks["turned"].affine, turned.affine)
    upright_again = nibabel.as_closest_canonical(masks["turned"])
    np.testing.assert_array_equal(upright_again.dataobj, masks["upright"].dataobj)
    assert 0 < np.asarray(masks["upright"].dataobj).mean() < 1
    assert areas["turned"] == areas["upright"]


@pytest.mark.slow
@pytest.mark.parametrize("adapt", ["running", "batch", "tsmobn", "random_alpha", "iabn", "mixnorm"])
def test_every_adaptation_is_exported_and_one_logit_is_a_class_beside_the_background(
    tmp_path, adapt
):
    model, prepare = UNet(num_classes=1, width=2, levels=1), standardize(0.4, 0.3)
    variables = model.init(jax.random.key(0), jnp.zeros((2, 16, 16, 3)))
    choice = choose_adaptation(adapt, model, 4)
    found = Predictor.by_choice(choice, variables, prepare)(UNSEEN.images)
    assert found.shape == (13, 16, 16, 2)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    asked = about("resize", form=served_folder.FORM, model="my_model:Net", dtype="uint8")
    asked = asked._replace(mean=[0.4], std=[0.3])
    served_folder.write_served(tmp_path / "served", asked, variables, {adapt: choice})
    again = load(tmp_path / "served", adapt, trust=True)
    np.testing.assert_allclose(again(UNSEEN.images), found, atol=1e-6)
    if adapt == "running":
        inputs = prepare(jnp.asarray(UNSEEN.images), jnp.float32)
        own = jax.nn.sigmoid(model.apply(variables, inputs))
        np.testing.assert_allclose(found[..., 1:], own, atol=1e-5)
