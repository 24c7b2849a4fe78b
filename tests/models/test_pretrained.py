"""Weights from elsewhere, and low-rank factors beside weights that stay."""

import re
import sys
import types
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from test_models import SMALL, arrays

from fedjax_bn import models
from fedjax_bn.models import ViTS16, from_nnx, pretrained
from fedjax_bn.models.low_rank import all_but_factors, lora, merged, with_factors
from fedjax_bn.models.torch_weights import from_torch, to_torch


@cache
def abstract(model):
    images = jax.ShapeDtypeStruct((1, 67, 67, 3), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images)


def drawn(model, seed=0):
    """Variables of a model with every leaf random, in the default float dtype."""
    leaves, tree = jax.tree.flatten(abstract(model))
    rng = np.random.default_rng(seed)
    return tree.unflatten([jnp.asarray(0.5 + rng.random(leaf.shape), float) for leaf in leaves])


def resnet_tensors(classes=7, width=8):
    """A ResNet of basic blocks (1, 2) by torchvision's names, written out by hand."""
    rng = np.random.default_rng(1)
    tensors = {}

    def put(name, *shape):
        tensors[name] = rng.random(shape).astype(np.float32) + 0.1

    def norm(name, channels):
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            put(f"{name}.{leaf}", channels)
        tensors[f"{name}.num_batches_tracked"] = np.array(9, np.int64)

    put("conv1.weight", width, 3, 7, 7)
    norm("bn1", width)
    wide = 2 * width
    blocks = ("layer1.0", width, width), ("layer2.0", width, wide), ("layer2.1", wide, wide)
    for block, inputs, outputs in blocks:
        put(f"{block}.conv1.weight", outputs, inputs, 3, 3)
        norm(f"{block}.bn1", outputs)
        put(f"{block}.conv2.weight", outputs, outputs, 3, 3)
        norm(f"{block}.bn2", outputs)
        if inputs != outputs:
            put(f"{block}.downsample.0.weight", outputs, inputs, 1, 1)
            norm(f"{block}.downsample.1", outputs)
    put("fc.weight", classes, 2 * width)
    put("fc.bias", classes)
    return tensors


def alexnet_tensors(widths, classes):
    """torchvision's AlexNet, whose dense layers are made small here."""
    rng = np.random.default_rng(0)
    tensors = {}
    channels = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3)}
    for index, (out, inputs, side) in (channels | {10: (256, 256, 3)}).items():
        tensors[f"features.{index}.weight"] = rng.random((out, inputs, side, side), np.float32)
        tensors[f"features.{index}.bias"] = rng.random(out, np.float32)
    inputs = (9216, *widths)
    for index, into, out in zip((1, 4, 6), inputs, (*widths, classes), strict=True):
        tensors[f"classifier.{index}.weight"] = rng.random((out, into), np.float32)
        tensors[f"classifier.{index}.bias"] = rng.random(out, np.float32)
    return tensors


def small_resnet(classes=7):
    return models.ResNet18(classes, stage_sizes=(1, 2), width=8)


def load(path, model=None):
    model = model or small_resnet()
    return pretrained.load_pretrained(path, model, drawn(model))


def test_a_file_gives_the_variables_of_from_torch(write, monkeypatch):
    """`test_models` shows that these give PyTorch's logits."""
    tensors = resnet_tensors()
    path = write(tensors)
    monkeypatch.setenv("HOME", str(path.parent))
    variables, notes = load(f"~/{path.name}")
    expected = from_torch(small_resnet(), tensors)
    jax.tree.map(np.testing.assert_array_equal, variables, expected)
    assert len(notes) == 1


def test_the_classifier_stays_fresh_where_the_number_of_classes_differs(write):
    model = small_resnet(5)
    before = drawn(model)
    variables, notes = pretrained.load_pretrained(write(resnet_tensors(1000)), model, before)
    after, before = variables["params"], before["params"]
    jax.tree.map(np.testing.assert_array_equal, after["head"], before["head"])
    assert not np.array_equal(after["norm1"]["scale"], before["norm1"]["scale"])
    assert "1000 classes" in notes[1]
    assert "this model 5" in notes[1]


def test_alexnet_takes_all_layers_whose_widths_fit_and_no_batch_norm(write):
    model = models.AlexNet(10, hidden=(32, 16))
    tensors = alexnet_tensors(widths=(32, 16), classes=12)
    before = drawn(model)
    variables, notes = pretrained.load_pretrained(write(tensors), model, before)
    new, old = flatten_dict(variables), flatten_dict(before)
    assert new.keys() == old.keys()
    for path, leaf in new.items():
        assert (leaf is old[path]) == path[1].startswith(("norm", "head"))
    layers = variables["params"]
    for i, index in enumerate((0, 3, 6, 8, 10), start=1):
        weight, bias = (tensors[f"features.{index}.{leaf}"] for leaf in ("weight", "bias"))
        np.testing.assert_array_equal(layers[f"conv{i}"]["kernel"], weight.transpose(2, 3, 1, 0))
        np.testing.assert_array_equal(layers[f"conv{i}"]["bias"], bias)
    # PyTorch flattens channels first.
    first = tensors["classifier.1.weight"].reshape(-1, 256, 6, 6).transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(layers["dense1"]["kernel"], first.reshape(9216, -1))
    np.testing.assert_array_equal(layers["dense2"]["kernel"], tensors["classifier.4.weight"].T)
    assert "batch norms start fresh" in notes[1]
    assert "classifier.fc3 starts fresh" in notes[2]


def test_densenet_takes_the_old_names_of_torchvisions_files(write):
    model = models.DenseNet121(7, block_sizes=(1, 2), growth=4, width=8)
    tensors = to_torch(model, drawn(model))
    old = {re.sub(r"(denselayer\d\.(?:norm|conv))(\d)", r"\1.\2", n): t for n, t in tensors.items()}
    assert "features.denseblock2.denselayer1.norm.2.running_var" in old
    new, _ = pretrained.load_pretrained(write(tensors), model, drawn(model))
    same, _ = pretrained.load_pretrained(write(old, "old.safetensors"), model, drawn(model))
    jax.tree.map(np.testing.assert_array_equal, new, same)


def test_a_hub_id_is_fetched_and_read_or_named(write, monkeypatch):
    path, asked = write(resnet_tensors()), []

    def download(repo_id, filename, revision=None):
        asked.append((repo_id, filename, revision))
        if revision:
            raise ConnectionError("name resolution failed")
        return str(path)

    hub = types.ModuleType("huggingface_hub")
    hub.hf_hub_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    variables, notes = load("timm/resnet18.tv_in1k")
    assert "timm/resnet18.tv_in1k" in notes[0]
    jax.tree.map(np.testing.assert_array_equal, variables, load(path)[0])
    with pytest.raises(ValueError, match="timm/resnet18"):
        load("timm/resnet18.tv_in1k@v1.2")
    files = ("timm/resnet18.tv_in1k", "model.safetensors")
    assert asked == [(*files, None), (*files, "v1.2")]


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


FAULTS = {
    "no statistic": (without("layer2.0.downsample.1.running_var"), "lacks 1 .*1.running_var"),
    "no head": (without("fc.weight"), "lacks 1 .*fc.weight"),
    "left over": ({"extra.weight": np.zeros(3, np.float32)}, "left over 1.*extra.weight"),
    "channels": ({"conv1.weight": np.zeros((8, 1, 7, 7))}, r"conv1.weight.*\(8, 3, 7, 7\)"),
    "overflow": ({"conv1.weight": np.full((8, 3, 7, 7), 1e300)}, "conv1.weight.*float32"),
    "variance": ({"bn1.running_var": np.full(8, -0.5, np.float32)}, "bn1.running_var"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_does_not_fit_is_named(write, fault):
    (change, message), tensors = FAULTS[fault], resnet_tensors()
    path = write(change(tensors) if callable(change) else tensors | change)
    with pytest.raises(ValueError, match=rf"{path}.*{message}"):
        load(path)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
def test_a_damaged_file_is_named(write, tmp_path, name):
    pytest.importorskip("torch")
    content = write(resnet_tensors()).read_bytes()[:300]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path / name}.* damaged"):
        load(tmp_path / name)


class _Runs:
    def __reduce__(self):
        return print, ("this must never run",)


def test_a_torch_file_runs_no_code(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    torch.save({"conv1.weight": _Runs()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil\.pth"):
        load(tmp_path / "evil.pth")
    assert not capsys.readouterr().out


def test_what_is_no_source_and_a_network_without_weights_are_named():
    for source in ("missing.safetensors", "resnet18"):
        with pytest.raises(FileNotFoundError, match=source):
            load(source)
    with pytest.raises(ValueError, match="DigitCNN"):
        pretrained.load_pretrained("x.safetensors", models.DigitCNN(), {})


@pytest.mark.usefixtures("x64")
def test_a_torch_file_gives_the_variables_of_from_torch_in_their_own_dtype(tmp_path):
    torch = pytest.importorskip("torch")
    import torch_models

    model, make_network, _ = SMALL["resnet_bottleneck"]
    network = make_network(torch_models)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    variables, _ = load(tmp_path / "weights.pth", model)
    expected = from_torch(model, arrays(network), (67, 67, 3))
    jax.tree.map(np.testing.assert_array_equal, variables, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float64")}


KEY = jax.random.key(0)
VIT = ViTS16(3, width=8, depth=1, heads=2, patch=4, image_size=8, param_dtype=float)


class Linen(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(4, param_dtype=float, name="first")(x))
        return nn.Dense(2, param_dtype=float, name="out")(inputs=x)


class Nnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.first = nnx.Linear(5, 4, param_dtype=float, rngs=rngs)
        self.out = nnx.Linear(4, 2, param_dtype=float, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.first(x)))


def random_like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), tree)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("make", [Linen, lambda: from_nnx(Nnx(nnx.Rngs(0)))])
def test_outputs_and_gradients_are_numpys_and_merging_keeps_the_outputs(make):
    network = make()
    model = lora(network, rank=3, where=lambda path: True)
    x = np.random.default_rng(0).normal(size=(6, 5))
    start = jax.jit(model.init)(KEY, jnp.asarray(x))
    plain = jax.jit(network.init)(KEY, jnp.asarray(x))
    np.testing.assert_array_equal(model.apply(start, x), network.apply(plain, x))
    variables = random_like(start, 1)

    def loss(variables):
        y = model.apply(variables, jnp.asarray(x))
        return y.sum(), y

    (_, y), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables)
    first, out = (jax.tree.map(np.asarray, variables["params"][n]) for n in ("first", "out"))
    whole = [layer["kernel"] + layer["lora_a"] @ layer["lora_b"] for layer in (first, out)]
    hidden = np.tanh(x @ whole[0] + first["bias"])
    np.testing.assert_allclose(y, hidden @ whole[1] + out["bias"], rtol=1e-12, atol=1e-12)
    by_hidden = np.ones((6, 2)) @ whole[1].T * (1 - hidden**2)
    kernels = {"first": (first, x.T @ by_hidden), "out": (out, hidden.T @ np.ones((6, 2)))}
    for name, (layer, by_kernel) in kernels.items():
        ours = slopes["params"][name]
        np.testing.assert_allclose(ours["lora_a"], by_kernel @ layer["lora_b"].T, rtol=1e-10)
        np.testing.assert_allclose(ours["lora_b"], layer["lora_a"].T @ by_kernel, rtol=1e-10)
    joined = merged(variables)
    assert jax.tree.structure(joined) == jax.tree.structure(plain)
    np.testing.assert_allclose(network.apply(joined, x), y, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_factors_are_on_the_chosen_layers_of_a_vit_and_the_rest_can_be_frozen():
    images = jax.random.normal(KEY, (2, 8, 8, 3), float)
    model = lora(VIT, rank=2, where=lambda path: path.endswith(("qkv", "fc1")))
    plain = jax.jit(VIT.init)(KEY, images)
    variables = with_factors(KEY, model, plain, images)
    block = variables["params"]["block0"]
    assert {name for name, layer in block.items() if "lora_a" in layer} == {"qkv", "fc1"}
    assert block["qkv"]["lora_b"].shape == (2, 24)
    frozen = all_but_factors("head")(variables)
    trained = {path for path, leaf in flatten_dict(frozen, sep="/").items() if not leaf}
    factors = {f"params/block0/{layer}/lora_{ab}" for layer in ("fc1", "qkv") for ab in "ab"}
    assert trained == factors | {"params/head/bias", "params/head/kernel"}
    moved = random_like(variables, 2)
    read = partial(model.apply, method=lambda net, x: net.features(x))
    expected = jax.jit(partial(VIT.apply, method="features"))(merged(moved), images)
    features = jax.jit(read)(moved, images)
    np.testing.assert_allclose(features, expected, rtol=1e-9, atol=1e-10)


def test_a_choice_of_no_layer_names_the_layers():
    model = lora(Linen(), rank=2, where=lambda path: "block" in path)
    with pytest.raises(ValueError, match="first, out"):
        jax.eval_shape(model.init, KEY, jnp.zeros((1, 5)))
