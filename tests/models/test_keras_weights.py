"""Keras' ResNet against its own form written in PyTorch, in float64."""

import json
import runpy
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
from fedjax_bn.models import ResNet50, pretrained

STAGES, WIDTH, CLASSES = (2, 1), 4, 7
BGR_MEANS = np.array((103.939, 116.779, 123.68))
MEAN, STD = np.array((0.485, 0.456, 0.406)), np.array((0.229, 0.224, 0.225))
MODEL = ResNet50(CLASSES, stage_sizes=STAGES, width=WIDTH, keras=True)


def arrays_of_keras():
    """Random arrays by Keras' names."""
    rng, arrays = np.random.default_rng(0), {}

    def layer(name, norm, side, inputs, outputs):
        arrays[f"{name}/kernel"] = rng.normal(size=(side, side, inputs, outputs)) / side
        arrays[f"{name}/bias"] = rng.normal(size=outputs)
        for leaf in ("gamma", "beta", "moving_mean"):
            arrays[f"{norm}/{leaf}"] = rng.normal(size=outputs)
        arrays[f"{norm}/moving_variance"] = rng.uniform(0.001, 1, outputs)

    layer("conv1", "bn_conv1", 7, 3, WIDTH)
    inputs = WIDTH
    for stage, size in enumerate(STAGES):
        width = WIDTH * 2**stage
        for block in range(size):
            place = f"{stage + 2}{'abc'[block]}_branch"
            out = 4 * width
            shapes = {"2a": (1, inputs, width), "2b": (3, width, width), "2c": (1, width, out)}
            if block == 0:
                shapes["1"] = (1, inputs, out)
            for branch, shape in shapes.items():
                layer(f"res{place}{branch}", f"bn{place}{branch}", *shape)
            inputs = out
    arrays["fc1000/kernel"] = rng.normal(size=(inputs, CLASSES))
    arrays["fc1000/bias"] = rng.normal(size=CLASSES)
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def write(folder, arrays):
    """Writes the arrays as shards of 300 bytes and a manifest."""
    joined = b"".join(array.tobytes() for array in arrays.values())
    paths = [f"group1-shard{i}.bin" for i in range(-(-len(joined) // 300))]
    for i, path in enumerate(paths):
        (folder / path).write_bytes(joined[300 * i : 300 * (i + 1)])
    weights = [{"name": name, "shape": array.shape} for name, array in arrays.items()]
    manifest = {"weightsManifest": [{"paths": paths, "weights": weights}]}
    (folder / "model.json").write_text(json.dumps(manifest))
    return folder


def converted(folder, monkeypatch, *options):
    """The file that the converter makes of a folder, as a user runs it."""
    target = folder / "made.safetensors"
    monkeypatch.setattr(sys, "argv", ["keras_resnet", str(folder), str(target), *options])
    runpy.run_path(str(runs.ROOT / "launch/convert/keras_resnet.py"), run_name="__main__")
    return target


def logits_of_keras(arrays, images):
    """Logits of RGB images u8[B, H, W, 3]; the border has the mean of the standardization."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    given = {name: torch.tensor(array.astype(np.float64)) for name, array in arrays.items()}

    def convolved(x, name, norm, stride=1, padding=0):
        kernel = given[f"{name}/kernel"].permute(3, 2, 0, 1)
        x = functional.conv2d(x, kernel, given[f"{name}/bias"], stride, padding)
        leaves = ("moving_mean", "moving_variance", "gamma", "beta")
        return functional.batch_norm(x, *(given[f"{norm}/{leaf}"] for leaf in leaves), eps=1e-3)

    wide = np.empty((len(images), images.shape[1] + 6, images.shape[2] + 6, 3))
    wide[:] = 255 * MEAN
    wide[:, 3:-3, 3:-3] = images
    x = torch.tensor((wide[..., ::-1] - BGR_MEANS).transpose(0, 3, 1, 2).copy())
    x = functional.max_pool2d(
        functional.pad(convolved(x, "conv1", "bn_conv1", 2).relu(), [1] * 4), 3, 2
    )
    for stage, size in enumerate(STAGES):
        for block in range(size):
            stride = 2 if stage and not block else 1
            res, bn = (f"{kind}{stage + 2}{'abc'[block]}_branch" for kind in ("res", "bn"))
            y = convolved(x, f"{res}2a", f"{bn}2a", stride).relu()
            y = convolved(y, f"{res}2b", f"{bn}2b", padding=1).relu()
            y = convolved(y, f"{res}2c", f"{bn}2c")
            x = (y + (x if block else convolved(x, f"{res}1", f"{bn}1", stride))).relu()
    return (x.mean((2, 3)) @ given["fc1000/kernel"] + given["fc1000/bias"]).numpy()


def form_of(model, images):
    shapes = jax.eval_shape(model.init, jax.random.key(0), images.astype(jnp.float32))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, float), shapes)


@pytest.mark.usefixtures("x64")
def test_logits_are_those_of_kerass_form(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    arrays = arrays_of_keras()
    images = np.random.default_rng(1).integers(0, 256, (2, 32, 40, 3))
    ours = jnp.asarray((images / 255 - MEAN) / STD)
    shapes = form_of(MODEL, ours)
    path = converted(write(tmp_path, arrays), monkeypatch)
    variables, notes = pretrained.load_pretrained(path, MODEL, shapes)
    assert len(notes) == 1
    # A network that begins after a block reads that block's maps, and its part of the same file.
    part, caught = MODEL.clone(after="layer1_0"), {"mutable": ["intermediates"]}
    caught["capture_intermediates"] = lambda module, _: module.name == part.after
    logits, state = jax.jit(partial(MODEL.apply, **caught))(variables, ours)
    (maps,) = state["intermediates"][part.after]["__call__"]
    expected = logits_of_keras(arrays, images)
    # The file is float32, and its rounding alone differs.
    np.testing.assert_allclose(logits, expected, atol=1e-6 * np.abs(expected).max())
    of_part, _ = pretrained.load_pretrained(path, part, form_of(part, maps))
    assert {*of_part["params"]} == {"layer1_1", "layer2_0", "head"}
    np.testing.assert_allclose(jax.jit(part.apply)(of_part, maps), logits, rtol=1e-9)
    path = converted(tmp_path, monkeypatch, "--classes", "7")
    variables, _ = pretrained.load_pretrained(path, MODEL, shapes)
    assert not any(leaf.any() for leaf in jax.tree.leaves(variables["params"]["head"]))
    with pytest.raises(ValueError, match="keras=True"):
        pretrained.load_pretrained(path, MODEL.clone(keras=False), shapes)
    with pytest.raises(FileNotFoundError, match=r"launch/convert/keras_resnet\.py"):
        pretrained.load_pretrained(tmp_path, MODEL, shapes)
    (tmp_path / "group1-shard0.bin").write_bytes(b"torn")
    with pytest.raises(SystemExit, match="damaged"):
        converted(tmp_path, monkeypatch)
