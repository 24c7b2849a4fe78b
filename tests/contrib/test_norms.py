"""Methods with batch norms of their own, and networks with other norms or none."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn import models
from fedjax_bn.contrib import fedwon, fixbn, hbn, pn
from fedjax_bn.methods import fedavg
from fedjax_bn.models.layers import Network

KEY = jax.random.key(0)
NETS = {
    "DenseNet121": (32, {"growth": 4, "width": 8, "block_sizes": (1, 2)}),
    "DigitCNN": (8, {"width": 8, "hidden": (8, 8)}),
    "ResNet18": (32, {"width": 4, "stage_sizes": (1, 2)}),
    "SmallCNN": (8, {}),
    "TinyDetector": (32, {"width": 4}),
    "UNet": (16, {"width": 4, "levels": 2}),
    "YOLOv5n": (64, {"width": 0.05}),
}
NUMBERS = {"TinyDetector": 8, "YOLOv5n": 8}  # of a box: where it is, whether there is one, classes


LONG = ("DenseNet121", "YOLOv5n")  # to trace


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in NETS]
)
def test_every_network_has_forms_without_running_statistics(name):
    side, fields = NETS[name]
    images = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
    plain = jax.eval_shape(getattr(models, name)(num_classes=3, **fields).init, KEY, images)
    for norm, missing in {"group": 0, "none": size(plain["batch_stats"])}.items():
        net = getattr(models, name)(num_classes=3, norm=norm, **fields)
        outputs, variables = jax.eval_shape(net.init_with_output, KEY, images)
        assert set(variables) == {"params"}
        sizes = {(leaf.shape[0], leaf.shape[-1]) for leaf in jax.tree.leaves(outputs)}
        assert sizes == {(2, NUMBERS.get(name, 3))}
        assert size(plain["params"]) - size(variables["params"]) == missing


class Grouped(Network):
    """A group norm alone."""

    norm: str = "group"

    @nn.compact
    def __call__(self, x):
        return self.normalize(x, "norm")


@pytest.mark.parametrize("channels", [6, 64])
def test_group_norm_is_pytorchs(x64, channels):
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(channels)
    x, scale, bias = (random.normal(size=s) for s in ((2, 3, 5, channels), channels, channels))
    variables = {"params": {"norm": {"group": {"scale": scale, "bias": bias}}}}
    ours = jax.jit(Grouped(param_dtype=float).apply)(variables, jnp.asarray(x))
    groups = {6: 1, 64: 16}[channels]
    theirs = torch.nn.functional.group_norm(
        torch.tensor(x).permute(0, 3, 1, 2), groups, *map(torch.tensor, (scale, bias))
    )
    np.testing.assert_allclose(ours, theirs.permute(0, 2, 3, 1), rtol=1e-9, atol=1e-10)


class Convolution(Network):
    """A convolution whose kernel is standardized."""

    norm: str = "none"

    @nn.compact
    def __call__(self, x):
        return self.convolve(x, 4, 3, padding=1, name="conv")


def test_a_convolution_without_norm_is_pytorchs_by_the_standardized_kernel(x64):
    torch = pytest.importorskip("torch")
    x, kernel = (np.random.default_rng(1).normal(size=s) for s in ((2, 6, 5, 3), (3, 3, 3, 4)))
    variables = {"params": {"conv": {"kernel": jnp.asarray(kernel)}}}
    ours = jax.jit(Convolution(param_dtype=float).apply)(variables, jnp.asarray(x))
    weights = torch.tensor(kernel).permute(3, 2, 0, 1)
    var, mean = torch.var_mean(weights, dim=(1, 2, 3), keepdim=True, correction=0)
    gain = np.sqrt(2 / (1 - 1 / np.pi))
    weights = gain * (weights - mean) / torch.sqrt(var * 27)
    theirs = torch.nn.functional.conv2d(torch.tensor(x).permute(0, 3, 1, 2), weights, padding=1)
    np.testing.assert_allclose(ours, theirs.permute(0, 2, 3, 1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("clip", [0.01, 100.0])
def test_fedwons_step_is_clipped_unit_by_unit(x64, clip):
    """A unit is an output's column of the kernel, and the whole bias."""
    variables = fed.in_float64(fed.variables_of(fed.PlainNet()))
    batches = fed.batches_of((4,))
    state, _ = fed.run_rounds(fedwon(fed.PlainNet(), optax.sgd(0.5), clip=clip), variables, batches)
    w = variables["params"]["dense"]
    x, y = (np.asarray(batches[name][0, 0]) for name in ("image", "label"))
    z = x @ w["kernel"] + w["bias"]
    residual = (np.exp(z) / np.exp(z).sum(1, keepdims=True) - np.eye(fed.CLASSES)[y]) / 4
    gradient = {"kernel": x.T @ residual, "bias": residual.sum(0)}
    expected = {}
    for name, g in gradient.items():
        size = lambda v: np.sqrt(np.square(v).sum(0, keepdims=True))  # noqa: E731
        factor = np.minimum(1, clip * np.maximum(size(w[name]), 1e-3) / size(g))
        expected[name] = w[name] - 0.5 * factor * g
    fed.assert_close(fed.global_variables(state)["params"]["dense"], expected, rtol=1e-9)


def test_fedwon_refuses_a_batch_norm_and_without_clipping_is_fedavg():
    net = models.MLP(fed.CLASSES, hidden=(8,))
    with pytest.raises(ValueError, match="fedwon"):
        fedwon(net, optax.sgd(0.1)).init(KEY, fed.variables_of(net), 2)
    plain = models.MLP(fed.CLASSES, hidden=(8,), norm="none")
    both = fedwon(plain, fed.SGD), fedavg(plain, fed.SGD)
    given = fed.begun(both[0], KEY, fed.variables_of(plain), 2), fed.batches_of((5, 4)), KEY
    assert len({method.round.lower(*given).as_text() for method in both}) == 1


SIZES, BATCH_KEY = (9, 4, 6), jax.random.key(1)
NET = fed.OneNorm()
FIXBN = fed.once(fixbn, NET, fed.SGD, from_round=1)


def variables_of(net=NET):
    variables = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), float), fed.variables_of(net))
    return jax.tree.map(lambda x: x + 0.3, variables)


def fixed(batches):
    """FixBN's state after a round whose statistics are fixed."""
    state = FIXBN.init(BATCH_KEY, variables_of(), 3)
    return FIXBN.round(state._replace(round=state.round + 1), batches, BATCH_KEY)[0]


def test_fixbn_that_never_comes_is_fedavg_and_once_it_comes_statistics_stay(x64):
    state, states = FIXBN.init(BATCH_KEY, variables_of(), 3), []
    for _ in range(3):
        state, _ = FIXBN.round(state, fed.batches_of(SIZES), BATCH_KEY)
        states.append(jax.device_get(state))
    fed.assert_close(states[0].shared, plain(fed.batches_of(SIZES)).shared, rtol=1e-12)
    early, late = states[0].shared, states[2].shared
    fed.assert_close(late["batch_stats"], early["batch_stats"], rtol=1e-14)  # their mean is rounded
    assert (late["params"]["bn"]["kernel"] != early["params"]["bn"]["kernel"]).any()


def test_a_step_of_fixbns_clients_is_the_step_of_the_pooled_data(x64):
    variables, batches = variables_of(), fed.batches_of((4, 3, 2))
    state = fixed(batches)
    valid = np.asarray(batches["valid"]).ravel()
    x = np.asarray(batches["image"]).reshape(len(valid), -1)[valid]
    y = np.asarray(batches["label"]).ravel()[valid]

    def loss(params):
        logits = NET.apply(variables | {"params": params}, x)  # by its running statistics
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    gradient = jax.jit(jax.grad(loss))(variables["params"])
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, variables["params"], gradient)
    fed.assert_close(fed.global_variables(state)["params"], expected, rtol=1e-10, atol=1e-12)


def plain(batches):
    return fed.run_rounds(fed.once(fedavg, NET, fed.SGD), variables_of(), batches)[0]


@pytest.mark.parametrize(("share", "plain"), [(1e3, plain), (-1e3, fixed)], ids=["batch", "fixed"])
def test_hbn_lies_between_fedavg_and_fixbn(x64, share, plain):
    variables, batches = variables_of(), fed.batches_of((4, 3, 2))
    method = fed.once(hbn, NET, fed.SGD)
    state = fed.begun(method, BATCH_KEY, variables, 3)
    personal = jax.tree.map(lambda t: jnp.full_like(t, share), state.personal)
    assert [leaf.shape for leaf in jax.tree.leaves(personal)] == [(3, 8)]
    state, _ = method.round(state._replace(personal=personal), batches, BATCH_KEY)
    ours, expected = (jax.tree.leaves(s.shared["params"]) for s in (state, plain(batches)))
    fed.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("t", [0.0, 40.0], ids=["half", "data alone"])
def test_hbns_server_moves_towards_the_pooled_hybrid_moments(x64, t):
    """`MapNet`'s batch norm sees the data themselves, three positions of two channels each.

    With t = 40 the hybrid moments are the batches', and their pool is that of the joined data.
    """
    variables, batches = variables_of(fed.MapNet()), fed.batches_of(SIZES)
    method = fed.once(hbn, fed.MapNet(), fed.SGD, momentum=0.25)
    start = fed.begun(method, BATCH_KEY, variables, 3)
    start = start._replace(personal=jax.tree.map(lambda x: jnp.full_like(x, t), start.personal))
    state, _ = method.round(start, batches, BATCH_KEY)
    old, new = variables["batch_stats"]["norm"], state.shared["batch_stats"]["norm"]
    a, images = 1 / (1 + np.exp(-t)), np.asarray(batches["image"]).reshape(3, -1, 4, 3, 2)
    counts, means, variances = [], [], []
    seen = np.asarray(batches["valid"]).reshape(-1, 4)
    for image, valid in zip(images.reshape(-1, 4, 3, 2), seen, strict=True):
        if valid.any():
            x = image[valid].reshape(-1, 2)
            counts.append(len(x))
            means.append((1 - a) * old["mean"] + a * x.mean(0))
            variances.append((1 - a) * old["var"] + a * x.var(0))
    mean = np.average(means, axis=0, weights=counts)
    var = np.average(variances + np.square(means - mean), axis=0, weights=counts)
    if t:
        x = images.reshape(-1, 3, 2)[seen.ravel()].reshape(-1, 2)
        np.testing.assert_allclose((mean, var), (x.mean(0), x.var(0)), rtol=1e-12)
    np.testing.assert_allclose(new["mean"], 0.75 * old["mean"] + 0.25 * mean, rtol=1e-11)
    np.testing.assert_allclose(new["var"], 0.75 * old["var"] + 0.25 * var, rtol=1e-11)


def test_a_step_trains_mean_and_variance_as_pytorch_does(x64):
    torch = pytest.importorskip("torch")
    variables, batches = fed.in_float64(fed.variables_of(fed.OneNorm())), fed.batches_of((4,))
    state, metrics = fed.run_rounds(fed.once(pn, fed.OneNorm(), fed.SGD), variables, batches)
    own = {name: variables[name] for name in ("params", "batch_stats")}
    own = jax.tree.map(lambda leaf: torch.tensor(np.array(leaf), requires_grad=True), own)
    params, stats = own["params"], own["batch_stats"]["a"]
    x = torch.tensor(np.array(batches["image"][0, 0]))
    x = x @ params["bn"]["kernel"] + params["bn"]["bias"]
    x = (x - stats["mean"]) / torch.sqrt(stats["var"] + 1e-5)
    x = torch.relu(x * params["a"]["scale"] + params["a"]["bias"])
    x = x @ params["c"]["kernel"] + params["c"]["bias"]
    label = torch.tensor(np.array(batches["label"][0, 0])).long()
    loss = torch.nn.functional.cross_entropy(x, label)
    loss.backward()
    stepped = jax.tree.map(lambda t: (t - 0.1 * t.grad).detach().numpy(), own)
    fed.assert_close(state.shared, stepped, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(metrics["loss"], [loss.item()], rtol=1e-12)
    assert (state.shared["batch_stats"]["a"]["var"] != variables["batch_stats"]["a"]["var"]).all()


def test_a_step_takes_no_variance_below_0(x64):
    """Whichever way the steps lead."""
    variables = fed.in_float64(fed.variables_of(fed.OneNorm()))
    statistics = []
    for rate in (1e3, -1e3):
        state, _ = fed.run_rounds(
            pn(fed.OneNorm(), optax.sgd(rate)), variables, fed.batches_of((4,))
        )
        statistics.append(state.shared["batch_stats"]["a"])
    mean, var = (np.stack([leaf[name] for leaf in statistics]) for name in ("mean", "var"))
    assert (var == 0).any()
    assert (var >= 0).all()
    assert (mean < 0).any()
