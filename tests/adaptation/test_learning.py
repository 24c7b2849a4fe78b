"""Adaptations that learn, against PyTorch in float64 on streams whose last batch is padded."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import norm_nets as nets
from fedjax_bn import adaptation

MODEL = nets.HandMade()
NORMS = {"block/inner": "block/conv", "middle": "conv", "last": "dense"}
BATCHES = nets.images_of(20).reshape(4, 5, 6, 6, 3)
# The third batch has no sample, and counts nowhere; the last one is padded.
VALID = np.array([[True] * 5, [True] * 5, [False] * 5, [True] * 3 + [False] * 2])
CLASSES = nets.CLASSES


@pytest.fixture
def variables(x64):
    made = nets.variables_of(MODEL, jnp.asarray(BATCHES[0], float))
    # Confident predictions, as of a trained network.
    made["params"]["out"]["kernel"] = 4 * made["params"]["out"]["kernel"]
    return made


def stream(made, variables):
    """The logits of the valid samples of each batch that has any, and the last carry."""
    carry, found, predict = jax.jit(made.init)(variables), [], jax.jit(made.predict)
    for images, seen in zip(jnp.asarray(BATCHES, float), VALID, strict=True):
        images = jnp.where(seen[:, None, None, None], images, jnp.nan)
        logits, carry = predict(variables, carry, images, seen)
        found += [np.asarray(logits)[seen]] * bool(seen.any())
    return found, carry


class Torch:
    """The same network over a dict name -> tensor, and the stream's valid images."""

    def __init__(self, variables):
        self.torch = pytest.importorskip("torch")
        flat = jax.tree_util.tree_leaves_with_path(variables)
        names = ["/".join(part.key for part in path) for path, _ in flat]
        self.start = {
            name: self.torch.tensor(np.asarray(leaf), dtype=self.torch.float64)
            for name, (_, leaf) in zip(names, flat, strict=True)
        }
        self.batches = [
            self.torch.tensor(np.asarray(x, float)[seen])
            for x, seen in zip(BATCHES, VALID, strict=True)
            if seen.any()
        ]

    def norm(self, leaves, name, x, own, moments):
        axes = tuple(range(x.ndim - 1))
        mean, var = x.mean(axes), x.var(axes, unbiased=False)
        if moments is not None:
            moments[f"batch_stats/{name}/mean"] = mean.detach()
            moments[f"batch_stats/{name}/var"] = x.var(axes, unbiased=True).detach()
        if not own:
            mean, var = (leaves[f"batch_stats/{name}/{kind}"] for kind in ("mean", "var"))
        scale, bias = (leaves[f"params/{name}/{kind}"] for kind in ("scale", "bias"))
        return (x - mean) / (var + 1e-5).sqrt() * scale + bias

    def features(self, leaves, x, own=True, moments=None):
        for number, (name, layer) in enumerate(NORMS.items()):
            if number == 1:
                x = x[:, ::2, ::2]
            if number == 2:
                x = x.mean((1, 2))
            x = x @ leaves[f"params/{layer}/kernel"] + leaves[f"params/{layer}/bias"]
            x = self.norm(leaves, name, x, own, moments).relu()
        return x

    def logits(self, leaves, x, **options):
        kernel, bias = leaves["params/out/kernel"], leaves["params/out/bias"]
        return self.features(leaves, x, **options) @ kernel + bias

    def entropy(self, logits):
        return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    def learning(self, learns):
        """The leaves as tensors that need a gradient where `learns(name)` holds."""
        leaves = {name: leaf.clone() for name, leaf in self.start.items()}
        own = [leaf.requires_grad_() for name, leaf in leaves.items() if learns(name)]
        return leaves, own


def of_a_norm(name):
    _, *module, leaf = name.split("/")
    return "/".join(module) in NORMS and leaf in ("scale", "bias")


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [pytest.param("tent", marks=pytest.mark.slow), "shot"])
def test_tent_and_shot_are_pytorchs_optimizers_on_their_formulas(name, variables):
    net = Torch(variables)
    torch = net.torch
    if name == "tent":
        leaves, own = net.learning(of_a_norm)
        optimizer = torch.optim.Adam(own, 0.05)
    else:
        leaves, own = net.learning(lambda name: "params" in name and "/out/" not in name)
        optimizer = torch.optim.SGD(own, 0.05, momentum=0.9)
    theirs = []
    for x in net.batches:
        logits = net.logits(leaves, x)
        loss = net.entropy(logits).mean()
        if name == "shot":
            mean = logits.softmax(-1).mean(0)
            loss = loss + (mean * mean.log()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.append(logits)
    ours, carry = stream(getattr(adaptation, name)(MODEL, 0.05), variables)
    assert_same(ours, theirs)
    moved = carry.parameters["block"]["inner"]["scale"]
    assert_same([moved], [leaves["params/block/inner/scale"]])
    assert np.abs(ours[1] - stream(adaptation.batch(MODEL), variables)[0][1]).max() > 1e-3


@pytest.mark.parametrize(
    ("margin", "reset"), [pytest.param(1.0, 0.0, marks=pytest.mark.slow), (0.3, 0.0), (0.3, 0.6)]
)
def test_sar_is_its_formulas_in_pytorch(margin, reset, variables):
    net = Torch(variables)
    torch, least, rho = net.torch, margin * math.log(CLASSES), 0.3
    leaves, own = net.learning(of_a_norm)
    optimizer, average, theirs, resets = torch.optim.SGD(own, 0.1, momentum=0.9), 0, [], 0
    left_out = 0
    for x in net.batches:
        theirs.append(net.logits(leaves, x))
        entropy = net.entropy(theirs[-1])
        first = entropy < least
        left_out += int((~first).sum())
        if not first.any():
            continue
        gradient = torch.autograd.grad(entropy[first].mean(), own)
        norm = torch.sqrt(sum(g.square().sum() for g in gradient))
        before = [leaf.detach().clone() for leaf in own]
        with torch.no_grad():
            for leaf, g in zip(own, gradient, strict=True):
                leaf += rho * g / norm
        entropy = net.entropy(net.logits(leaves, x))
        second = first & (entropy < least)
        loss = entropy[second].mean()
        optimizer.zero_grad()
        if second.any():
            loss.backward()
        with torch.no_grad():
            for leaf, value in zip(own, before, strict=True):
                leaf.copy_(value)
        if not second.any():
            continue
        optimizer.step()
        average = loss.item() if average == 0 else 0.9 * average + 0.1 * loss.item()
        if average < reset:
            leaves, own = net.learning(of_a_norm)
            optimizer, average, resets = torch.optim.SGD(own, 0.1, momentum=0.9), 0, resets + 1
    made = adaptation.sar(MODEL, 0.1, margin=margin, rho=rho, reset=reset)
    ours, carry = stream(made, variables)
    assert_same(ours, theirs)
    np.testing.assert_allclose(carry.average, average, rtol=1e-9)
    assert (resets > 0) == (reset > 0)
    assert (left_out > 0) == (margin < 1)


@pytest.mark.parametrize("most", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_t3a_keeps_the_surest_supports_of_each_class(most, variables):
    net = Torch(variables)
    torch, start = net.torch, net.start
    kernel, bias = start["params/out/kernel"], start["params/out/bias"]
    unit = torch.nn.functional.normalize
    entropies = net.entropy(kernel.T @ kernel + bias)
    kept = [[(entropies[k].item(), unit(kernel[:, k], dim=0))] for k in range(CLASSES)]
    theirs = []
    for x in net.batches:
        features = net.features(start, x, own=False)
        logits = features @ kernel + bias
        for z, one, sure in zip(features, logits, net.entropy(logits), strict=True):
            kept[one.argmax()].append((sure.item(), unit(z, dim=0)))
        kept = [sorted(one, key=lambda pair: pair[0])[:most] for one in kept]
        centres = torch.stack([unit(sum(z for _, z in one), dim=0) for one in kept], 1)
        theirs.append(features @ centres)
    ours, carry = stream(adaptation.t3a(MODEL, most), variables)
    assert_same(ours, theirs)
    assert np.isfinite(carry.entropy).sum(1).tolist() == [len(one) for one in kept]


def test_atp_moves_every_leaf_by_its_own_rate(variables):
    net = Torch(variables)
    random = np.random.default_rng(5)
    rates = jax.tree.map(
        lambda leaf: jnp.asarray(random.uniform(-0.1, 0.4)),
        {name: variables[name] for name in ("params", "batch_stats")},
    )
    own_rates = Torch(rates).start
    theirs, mean, count = [], None, 0
    for x in net.batches:
        h = directions(net, x)
        if mean is not None:
            share = len(x) / (count + len(x))
            h = {name: (1 - share) * mean[name] + share * h[name] for name in h}
        mean, count = h, count + len(x)
        theirs.append(net.logits(moved(net, own_rates, h), x, own=False))
    ours, _ = stream(adaptation.atp(MODEL, rates), variables)
    assert_same(ours, theirs)


def directions(net, x):
    """h of every leaf."""
    leaves, own = net.learning(lambda name: name.startswith("params"))
    moments = {}
    net.entropy(net.logits(leaves, x, own=False, moments=moments)).mean().backward()
    h = {name: -leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert len(h) == len(own)
    return h | {name: value - net.start[name] for name, value in moments.items()}


def moved(net, rates, h):
    found = {name: leaf + rates[name] * h[name] for name, leaf in net.start.items()}
    for name in found:
        if name.endswith("/var"):
            found[name] = found[name].clamp(min=0)
    return found


def test_learn_rates_is_the_authors_rule_in_pytorch(variables):
    net = Torch(variables)
    torch, rate, labels = net.torch, 0.7, np.arange(20).reshape(4, 5) % CLASSES
    zeros = {name: torch.zeros((), dtype=torch.float64) for name in net.start}
    order = [(0, 1), (3, 2)]  # the batches of two clients

    def client(rates, batches):
        for i in batches:
            if not VALID[i].any():
                continue
            x = torch.tensor(np.asarray(BATCHES[i], float)[VALID[i]])
            h = directions(net, x)
            rates = {name: one.detach().requires_grad_() for name, one in rates.items()}
            logits = net.logits(moved(net, rates, h), x, own=False)
            seen = torch.tensor(labels[i][VALID[i]])
            torch.nn.functional.cross_entropy(logits, seen).backward()
            rates = {n: r - rate * r.grad / h[n].numel() ** 0.5 for n, r in rates.items()}
        return {name: one.detach() for name, one in rates.items()}

    theirs = zeros
    for _ in range(2):
        both = [client(theirs, batches) for batches in order]
        theirs = {name: (both[0][name] + both[1][name]) / 2 for name in theirs}
    pick = np.array(order)
    batches = {
        "image": jnp.asarray(BATCHES, float)[pick],
        "label": jnp.asarray(labels)[pick],
        "valid": jnp.asarray(VALID)[pick],
    }
    learn = partial(adaptation.learn_rates, MODEL, variables)
    ours = Torch(learn(batches, rate=rate, rounds=2)).start
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-8, atol=1e-12)
    assert max(map(abs, theirs.values())) > 1e-3
    with pytest.raises(ValueError, match="smaller rate"):
        learn(batches | {"image": batches["image"].at[0, 0].set(jnp.inf)}, rate=rate)
