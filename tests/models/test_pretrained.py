"""Pretrained weights: the same logits as PyTorch, no tensor lost, every fault named."""

import re
import sys
import types
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from fedjax_bn import models
from fedjax_bn.models import pretrained
from fedjax_bn.models.torch_weights import from_torch
from torchvision_tensors import alexnet_tensors, resnet_tensors

SMALL = {
    "resnet_basic": (
        lambda n: models.ResNet18(n, stage_sizes=(1, 2), width=8),
        lambda t: t.ResNet(t.BasicBlock, (1, 2), 8, 7),
    ),
    "resnet_bottleneck": (
        lambda n: models.ResNet50(n, stage_sizes=(2, 1), width=4),
        lambda t: t.ResNet(t.Bottleneck, (2, 1), 4, 7),
    ),
    "densenet": (
        lambda n: models.DenseNet121(n, block_sizes=(1, 2), growth=4, width=8),
        lambda t: t.DenseNet((1, 2), 4, 8, 7),
    ),
    "alexnet": (
        lambda n: models.AlexNet(n, hidden=(32, 16)),
        lambda t: t.AlexNet(7, hidden=(32, 16)),
    ),
}


@cache
def abstract(model):
    images = jax.ShapeDtypeStruct((1, 67, 67, 3), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images)


def drawn(model, seed=0):
    """Variables of a model with every leaf random, in the default float dtype."""
    leaves, tree = jax.tree.flatten(abstract(model))
    rng = np.random.default_rng(seed)
    return tree.unflatten([jnp.asarray(0.5 + rng.random(leaf.shape), float) for leaf in leaves])


def small_resnet(classes=7):
    return SMALL["resnet_basic"][0](classes)


def test_a_file_of_weights_may_be_below_the_home_folder(write, monkeypatch):
    path = write(resnet_tensors())
    monkeypatch.setenv("HOME", str(Path(path).parent))
    variables = pretrained.load_pretrained(path, small_resnet(), drawn(small_resnet()))[0]
    same = pretrained.load_pretrained(
        f"~/{Path(path).name}", small_resnet(), drawn(small_resnet())
    )[0]
    jax.tree.map(np.testing.assert_array_equal, variables, same)


def test_every_tensor_reaches_its_place_in_our_layout(write):
    tensors = resnet_tensors()
    variables, notes = pretrained.load_pretrained(
        write(tensors), small_resnet(), drawn(small_resnet())
    )
    params, stats = variables["params"], variables["batch_stats"]
    kernel = params["layer2_0"]["conv1"]["kernel"]
    np.testing.assert_array_equal(kernel[2, 1], tensors["layer2.0.conv1.weight"][..., 2, 1].T)
    shortcut = params["layer2_0"]["shortcut_conv"]["kernel"]
    np.testing.assert_array_equal(
        shortcut[0, 0], tensors["layer2.0.downsample.0.weight"][..., 0, 0].T
    )
    for ours, theirs in (
        (params["head"]["kernel"], tensors["fc.weight"].T),
        (params["head"]["bias"], tensors["fc.bias"]),
        (params["norm1"]["scale"], tensors["bn1.weight"]),
        (params["layer2_0"]["shortcut_norm"]["bias"], tensors["layer2.0.downsample.1.bias"]),
        (stats["layer1_0"]["norm2"]["mean"], tensors["layer1.0.bn2.running_mean"]),
        (stats["layer2_1"]["norm1"]["var"], tensors["layer2.1.bn1.running_var"]),
    ):
        np.testing.assert_array_equal(ours, theirs)
    # Each tensor but the counters exactly once: the sums of all values agree.
    used = [tensor for name, tensor in tensors.items() if not name.endswith("tracked")]
    assert len(jax.tree.leaves(variables)) == len(used)
    total = sum(np.sum(np.asarray(leaf), dtype=np.float64) for leaf in jax.tree.leaves(variables))
    assert total == pytest.approx(sum(tensor.sum(dtype=np.float64) for tensor in used), rel=1e-12)
    assert len(notes) == 1


def test_the_classifier_stays_fresh_where_the_number_of_classes_differs(write):
    model = small_resnet(5)
    before = drawn(model)
    variables, notes = pretrained.load_pretrained(write(resnet_tensors(1000)), model, before)
    jax.tree.map(
        np.testing.assert_array_equal, variables["params"]["head"], before["params"]["head"]
    )
    assert not np.array_equal(
        variables["params"]["norm1"]["scale"], before["params"]["norm1"]["scale"]
    )
    assert "1000 classes" in notes[1]
    assert "this model 5" in notes[1]


def test_dtypes_of_the_variables_are_kept_whatever_the_file_has(write):
    tensors = {name: tensor.astype(np.float16) for name, tensor in resnet_tensors().items()}
    model = small_resnet()
    with jax.enable_x64(True):
        variables, _ = pretrained.load_pretrained(write(tensors), model, drawn(model))
        assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float64")}
        scale = variables["params"]["norm1"]["scale"]
        np.testing.assert_array_equal(scale, tensors["bn1.weight"].astype(np.float64))


def test_loading_works_inside_a_trace_and_on_abstract_variables(write):
    path, model = write(resnet_tensors(9)), small_resnet()

    def start(key):
        images = jnp.zeros((1, 67, 67, 3))
        return pretrained.load_pretrained(path, model, model.init(key, images))[0]

    shapes = jax.eval_shape(start, jax.random.key(0))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, abstract(model))


def test_alexnet_takes_all_layers_whose_widths_fit_and_no_batch_norm(write):
    model, tensors = SMALL["alexnet"][0](10), alexnet_tensors(widths=(32, 16), classes=12)
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
    maps = np.random.default_rng(0).random((2, 256, 6, 6))  # channels first, as PyTorch flattens
    ours = maps.transpose(0, 2, 3, 1).reshape(2, -1) @ np.float64(layers["dense1"]["kernel"])
    theirs = maps.reshape(2, -1) @ np.float64(tensors["classifier.1.weight"]).T
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    np.testing.assert_array_equal(layers["dense2"]["kernel"], tensors["classifier.4.weight"].T)
    assert "batch norms start fresh" in notes[1]
    assert notes[2] == (
        "pretrained: classifier.fc3 starts fresh, because the file's is 16 to 12 and this model's "
        "16 to 10"
    )


def test_alexnets_dense_layers_of_other_widths_start_fresh(write):
    model = SMALL["alexnet"][0](10)
    before = drawn(model)
    variables, notes = pretrained.load_pretrained(write(alexnet_tensors()), model, before)
    for name in ("dense1", "dense2", "head"):
        assert variables["params"][name]["kernel"] is before["params"][name]["kernel"]
    assert "because the file's is 9216 to 8 and this model's 9216 to 32" in notes[2]
    assert len(notes) == 5


def test_densenet_takes_the_old_names_of_torchvisions_files(write):
    model = SMALL["densenet"][0](7)
    shapes = flatten_dict(abstract(model))
    rng = np.random.default_rng(0)
    tensors = {}
    for path, leaf in shapes.items():
        name = pretrained.torch_name(model, path)
        order = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[len(leaf.shape)]
        tensors[name] = rng.random(leaf.shape, np.float32).transpose(order)
    old = {re.sub(r"(denselayer\d\.(?:norm|conv))(\d)", r"\1.\2", n): t for n, t in tensors.items()}
    assert "features.denseblock2.denselayer1.norm.2.running_var" in old
    new, _ = pretrained.load_pretrained(write(tensors), model, drawn(model))
    same, _ = pretrained.load_pretrained(write(old, "old.safetensors"), model, drawn(model))
    jax.tree.map(np.testing.assert_array_equal, new, same)


# The hub


@pytest.fixture
def hub(monkeypatch):
    """Returns a function that installs a hub of our own instead of huggingface_hub."""

    def install(download):
        module = types.ModuleType("huggingface_hub")
        module.hf_hub_download = download
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)

    return install


@pytest.mark.parametrize("revision", [None, "v1.2"])
def test_a_hub_id_is_fetched_and_read(write, hub, revision):
    path, asked = write(resnet_tensors()), []

    def download(repo_id, filename, revision=None):
        asked.append((repo_id, filename, revision))
        return str(path)

    hub(download)
    source = "timm/resnet18.tv_in1k" + (f"@{revision}" if revision else "")
    variables, notes = pretrained.load_pretrained(source, small_resnet(), drawn(small_resnet()))
    assert asked == [("timm/resnet18.tv_in1k", "model.safetensors", revision)]
    assert source in notes[0]
    expected, _ = pretrained.load_pretrained(path, small_resnet(), drawn(small_resnet()))
    jax.tree.map(np.testing.assert_array_equal, variables, expected)


def test_a_hub_that_cannot_be_reached_is_an_error_with_a_remedy(hub):
    def download(*args, **kwargs):
        raise ConnectionError("name resolution failed")

    hub(download)
    with pytest.raises(ValueError, match="timm/resnet18"):
        pretrained.load_pretrained(
            "timm/resnet18.tv_in1k", small_resnet(), abstract(small_resnet())
        )


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("huggingface_hub", "timm/resnet18.tv_in1k"),
        ("safetensors.numpy", "weights.safetensors"),
        ("torch", "weights.pth"),
    ],
)
def test_a_package_that_is_not_installed_is_named(monkeypatch, tmp_path, package, source):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    if "/" not in source:
        (tmp_path / source).write_bytes(b"anything")
    with pytest.raises(ModuleNotFoundError, match=f"{package.split('.')[0]}.*pip install"):
        pretrained.load_pretrained(source, small_resnet(), abstract(small_resnet()))


# Faults


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


FAULTS = {
    "no statistic": (without("layer2.0.downsample.1.running_var"), "lacks 1 .*1.running_var"),
    "no head": (without("fc.weight"), "lacks 1 .*fc.weight"),
    "empty": (lambda t: {}, "lacks"),
    "left over": ({"extra.weight": np.zeros(3, np.float32)}, "left over 1 .*extra.weight"),
    "counter": (
        {"extra.num_batches_tracked": np.zeros(1, np.int64)},
        "left over 1 .*extra.num_batches_tracked",
    ),
    "channels": (
        {"conv1.weight": np.zeros((8, 1, 7, 7), np.float32)},
        r"conv1.weight has shape \(8, 1, 7, 7\), but this model needs \(8, 3, 7, 7\)",
    ),
    "features": (
        {"fc.weight": np.zeros((7, 3), np.float32)},
        r"fc.weight has shape \(7, 3\), but this model needs \(7, 16\)",
    ),
    "nan": ({"bn1.bias": np.full(8, np.nan, np.float32)}, "bn1.bias hold.* not finite"),
    "infinite": (
        {"layer1.0.bn1.weight": np.full(8, np.inf, np.float32)},
        "layer1.0.bn1.weight holds values that are not finite",
    ),
    "overflow": (
        {"conv1.weight": np.full((8, 3, 7, 7), 1e300)},
        "conv1.weight holds values that are not finite in float32",
    ),
    "variance": (
        {"bn1.running_var": np.full(8, -0.5, np.float32)},
        r"bn1.running_var holds -0.5; a variance is at least 0",
    ),
    "integers": (
        {"bn1.weight": np.ones(8, np.int32)},
        "bn1.weight holds int32; weights are floating-point numbers",
    ),
    "scalar": ({"bn1.weight": np.float32(1)}, r"bn1.weight has shape \(\), but .* \(8,\)"),
    "scalar head": ({"fc.weight": np.float32(1)}, r"fc.weight has shape \(\), but"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_does_not_fit_is_named(write, fault):
    (change, message), tensors = FAULTS[fault], resnet_tensors()
    path = write(change(tensors) if callable(change) else tensors | change)
    with pytest.raises(ValueError, match=message) as caught:
        pretrained.load_pretrained(path, small_resnet(), abstract(small_resnet()))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kept", [0, 5, 300, -7])
def test_a_truncated_safetensors_file_is_named(write, kept):
    path = write(resnet_tensors())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"{path}.* damaged.*fetch the file again"):
        pretrained.load_pretrained(path, small_resnet(), abstract(small_resnet()))


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 half an archive"])
def test_a_damaged_torch_file_is_named(tmp_path, content):
    pytest.importorskip("torch")
    path = tmp_path / "resnet18.pth"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path}.* damaged.*fetch the file again"):
        pretrained.load_pretrained(path, small_resnet(), abstract(small_resnet()))


def test_two_names_of_one_tensor_are_refused(write):
    model = models.AlexNet(num_classes=3)
    tensors = {f"features.{name}.bias": np.zeros(64, np.float32) for name in ("0", "conv1")}
    with pytest.raises(ValueError, match=r"features\.conv1\.bias"):
        pretrained.load_pretrained(write(tensors), model, abstract(model))


def test_a_torch_file_of_scalars_is_named(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(1.0) for name in resnet_tensors()}
    torch.save(tensors, tmp_path / "scalars.pth")
    with pytest.raises(ValueError, match=r"scalars\.pth"):
        pretrained.load_pretrained(
            tmp_path / "scalars.pth", small_resnet(), abstract(small_resnet())
        )


class _Runs:
    def __reduce__(self):
        return print, ("this must never run",)


def test_a_torch_file_runs_no_code(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    torch.save({"conv1.weight": _Runs()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil\.pth"):
        pretrained.load_pretrained(tmp_path / "evil.pth", small_resnet(), abstract(small_resnet()))
    assert not capsys.readouterr().out


def test_what_is_no_source_is_an_error_that_says_what_to_give(tmp_path):
    model = small_resnet()
    (tmp_path / "weights.bin").write_bytes(b"x")
    for source, kind in (
        (tmp_path / "missing.safetensors", FileNotFoundError),
        ("weights/missing.pth", FileNotFoundError),
        ("resnet18", FileNotFoundError),
        (tmp_path, ValueError),
        (tmp_path / "weights.bin", ValueError),
    ):
        with pytest.raises(kind, match=rf"{source}.*give a .safetensors"):
            pretrained.load_pretrained(source, model, abstract(model))


def test_a_network_without_pretrained_weights_is_named():
    with pytest.raises(ValueError, match="ResNet18"):
        pretrained.load_pretrained("x.safetensors", models.DigitCNN(), {})


# Beside PyTorch: `test_models` shows that `from_torch` gives PyTorch's logits


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", SMALL)
def test_a_torch_file_gives_the_variables_of_from_torch(tmp_path, name):
    torch = pytest.importorskip("torch")
    import torch_models

    make_model, make_network = SMALL[name]
    network, model = make_network(torch_models).double(), make_model(7)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    variables, _ = pretrained.load_pretrained(tmp_path / "weights.pth", model, drawn(model))
    arrays = {name: tensor.detach().numpy() for name, tensor in network.state_dict().items()}
    expected = from_torch(model, arrays, (67, 67, 3))
    jax.tree.map(np.testing.assert_array_equal, variables, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float64")}
