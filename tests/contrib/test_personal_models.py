"""Personal parts: sharing rules with names, own models, and gPerXAN, beside PyTorch in float64."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn.contrib import apfl, ditto, fedala, fedbabu, fedrep, fedrod, gperxan
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization import BatchNorm
from fedjax_bn.serving import predictor
from fedjax_bn.sharing import OWN, at, path_names

SIZES, RATE = (8, 4), 0.1  # two steps and one


class HeadNet(nn.Module):
    """A body and a head."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(fed.CLASSES, name="head")(jnp.tanh(nn.Dense(5, name="body")(x)))


class Maps(nn.Module):
    """A batch norm that sees maps f[B, 3, 2]."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(BatchNorm(name="norm")(x.reshape(len(x), 3, 2)))
        return nn.Dense(fed.CLASSES, name="head")(x.mean(1))


def logits_of(w, x):
    body, head = w["body"], w["head"]
    return (x @ body["kernel"] + body["bias"]).tanh() @ head["kernel"] + head["bias"]


class Reference:
    """Leaves, gradients and batches of `HeadNet` in PyTorch."""

    def __init__(self):
        self.torch = pytest.importorskip("torch")
        self.start = self.tree(fed.in_float64(fed.variables_of(HeadNet()))["params"])
        self.names = list(self.start)

    def tree(self, params):
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return {path_names(p): self.torch.tensor(np.asarray(leaf)) for p, leaf in leaves}

    def batches(self, k):
        batches = fed.batches_of(SIZES)
        for s in range(2):
            valid = np.asarray(batches["valid"][k, s])
            if valid.any():
                x, y = (np.asarray(batches[name][k, s])[valid] for name in ("image", "label"))
                yield self.torch.tensor(x), self.torch.tensor(y, dtype=self.torch.long)

    def gradient(self, w, x, y):
        w = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
        nested = {part: {n: w[part, n] for n in ("kernel", "bias")} for part in ("body", "head")}
        loss = self.torch.nn.functional.cross_entropy(logits_of(nested, x), y)
        return dict(zip(w, self.torch.autograd.grad(loss, list(w.values())), strict=True))

    def moved(self, w, g, names=None, rate=RATE):
        return {n: w[n] - rate * g[n] if names is None or n in names else w[n] for n in w}

    def rounds(self, client, count=2):
        """The shared leaves after some rounds of `client(k, w) -> w`."""
        w = self.start
        for _ in range(count):
            each = [client(k, w) for k in range(2)]
            w = {n: (2 * each[0][n] + each[1][n]) / 3 for n in w}
        return w


@pytest.fixture
def reference(x64):
    return Reference()


def ours_after(method, rounds=2):
    state, _ = fed.run_rounds(
        method, fed.in_float64(fed.variables_of(HeadNet())), fed.batches_of(SIZES), rounds
    )
    return state


def same(reference, tree, expected):
    found = reference.tree(tree)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)


def test_ditto_is_two_rounds_of_the_papers_steps(reference):
    r, weight, own = reference, 0.7, 2 * [reference.start]

    def client(k, w):
        local = w
        for x, y in r.batches(k):
            local, g, v = r.moved(local, r.gradient(local, x, y)), r.gradient(own[k], x, y), own[k]
            own[k] = r.moved(v, {n: g[n] + weight * (v[n] - w[n]) for n in g})
        return local

    w = r.rounds(client)
    state = ours_after(ditto(HeadNet(), optax.sgd(RATE), weight=weight))
    same(r, state.shared["params"], w)
    for k in range(2):
        same(r, fed.client(state.personal[OWN]["model"], k)["params"], own[k])


def test_apfl_is_two_rounds_of_the_papers_steps(reference):
    r, alpha_rate = reference, 0.5
    local, alphas, mixed = [r.start, r.start], [0.3, 0.3], [None, None]
    mix = lambda a, v, w: {n: a * v[n] + (1 - a) * w[n] for n in v}  # noqa: E731

    def client(k, shared):
        v, a = local[k], alphas[k]
        for step, (x, y) in enumerate(r.batches(k)):
            g = r.gradient(mix(a, v, shared), x, y)
            slope = sum(float((g[n] * (v[n] - shared[n])).sum()) for n in g)
            old, a = a, a if step else min(max(a - alpha_rate * slope, 0.0), 1.0)
            v, shared = r.moved(v, g, rate=RATE * old), r.moved(shared, r.gradient(shared, x, y))
        local[k], alphas[k], mixed[k] = v, a, mix(a, v, shared)
        return shared

    w = r.rounds(client)
    assert alphas[0] != 0.3
    state = ours_after(apfl(HeadNet(), optax.sgd(RATE), alpha=0.3, alpha_rate=alpha_rate))
    same(r, state.shared["params"], w)
    np.testing.assert_allclose(state.personal[OWN]["alpha"], alphas, rtol=1e-9)
    for k in range(2):
        same(r, fed.client(state.personal[OWN]["model"], k)["params"], mixed[k])


@pytest.mark.parametrize("names", ["", pytest.param("body,head", marks=pytest.mark.slow)])
def test_fedala_weighs_the_last_layers_as_the_paper_does(reference, names):
    r, rate = reference, 5.0
    own, chosen = [r.start, r.start], [n for n in r.names if n[0] in (names or "head")]
    weights = [{n: r.torch.ones_like(r.start[n]) for n in chosen} for _ in range(2)]

    def client(k, w):
        way = {n: w[n] - own[k][n] for n in chosen}
        at = lambda: w | {n: own[k][n] + way[n] * weights[k][n] for n in chosen}  # noqa: E731
        for x, y in r.batches(k):
            g = r.gradient(at(), x, y)
            weights[k] = {n: (weights[k][n] - rate * g[n] * way[n]).clamp(0, 1) for n in chosen}
        own[k] = at()
        for x, y in r.batches(k):
            own[k] = r.moved(own[k], r.gradient(own[k], x, y))
        return own[k]

    w = r.rounds(client, 3)
    assert min(float(leaf.min()) for leaf in weights[1].values()) < 1
    state = ours_after(fedala(HeadNet(), optax.sgd(RATE), rate=rate, names=names), rounds=3)
    same(r, state.shared["params"], w)
    for k in range(2):
        same(r, fed.client(state.personal[OWN]["model"], k)["params"], own[k])


@pytest.mark.parametrize("head_epochs", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_fedrep_trains_heads_first_and_then_the_body(reference, head_epochs):
    r = reference
    head, body = ([n for n in r.names if n[0] == part] for part in ("head", "body"))
    own = [r.start, r.start]

    def client(k, w):
        own[k] = {n: own[k][n] if n in head else w[n] for n in w}
        for part in [head] * head_epochs + [body]:
            for x, y in r.batches(k):
                own[k] = r.moved(own[k], r.gradient(own[k], x, y), part)
        return own[k]

    w = r.rounds(client)
    state = ours_after(fedrep(HeadNet(), optax.sgd(RATE), head_epochs=head_epochs))
    same(r, state.shared["params"], {n: w[n] for n in body})
    for k in range(2):
        same(r, fed.client(state.personal["params"], k), {n: own[k][n] for n in head})


def test_fedbabu_trains_the_body_and_tunes_a_head_on_what_it_received(reference):
    r = reference
    head, body = ([n for n in r.names if n[0] == part] for part in ("head", "body"))
    own = [{}, {}]

    def client(k, w):
        w = w | {n: r.start[n] for n in head}
        own[k], local = w, w
        for x, y in 2 * [*r.batches(k)]:
            own[k] = r.moved(own[k], r.gradient(own[k], x, y), head)
        for x, y in r.batches(k):
            local = r.moved(local, r.gradient(local, x, y), body)
        return local

    w = r.rounds(client)
    state = ours_after(fedbabu(HeadNet(), optax.sgd(RATE), tune_epochs=2))
    same(r, state.shared["params"], {n: w[n] for n in body})
    for k in range(2):
        fixed = fed.client(state.personal["params"], k)
        fed.assert_equal(r.tree(fixed), {n: r.start[n] for n in head})
        same(r, fed.client(state.personal[OWN]["model"], k)["params"], own[k])


def test_fedrod_balances_the_shared_head_and_adds_a_personal_one(reference):
    r, entropy = reference, reference.torch.nn.functional.cross_entropy
    own = [{n: r.start[n] for n in r.names if n[0] == "head"} for _ in range(2)]
    priors = []

    def client(k, local):
        labels = r.torch.cat([y for _, y in r.batches(k)])
        priors.append(r.torch.bincount(labels, minlength=fed.CLASSES).double().log())
        for x, y in r.batches(k):
            leaves, heads = (
                {n: leaf.clone().requires_grad_() for n, leaf in tree.items()}
                for tree in (local, own[k])
            )
            z = (x @ leaves["body", "kernel"] + leaves["body", "bias"]).tanh()
            g = z @ leaves["head", "kernel"] + leaves["head", "bias"]
            p = g.detach() + z.detach() @ heads["head", "kernel"] + heads["head", "bias"]
            (entropy(g + priors[-1], y) + entropy(p, y)).backward()
            local = r.moved(local, {n: leaf.grad for n, leaf in leaves.items()})
            own[k] = r.moved(own[k], {n: leaf.grad for n, leaf in heads.items()})
        return local

    w, images = r.rounds(client), fed.batches_of(SIZES)["image"][0, 0]
    assert not priors[-1].isfinite().all()  # the second client lacks a class
    state = ours_after(fedrod(HeadNet(), optax.sgd(RATE)))
    same(r, state.shared["params"], w)
    models = [fed.client(fed.client_variables(state), k) for k in range(2)]
    models.append(fed.global_variables(state))  # of an unseen client
    for model, head in zip(models, [*own, {}], strict=True):
        summed = {n: (w[n] + head.get(n, 0)).numpy() for n in w}
        expected = np.tanh(images @ summed["body", "kernel"] + summed["body", "bias"])
        expected = expected @ summed["head", "kernel"] + summed["head", "bias"]
        np.testing.assert_allclose(forward(HeadNet(), model, images).outputs, expected, rtol=1e-9)


def test_gperxan_is_two_rounds_of_its_formulas(x64):
    torch = pytest.importorskip("torch")
    variables = fed.in_float64(fed.variables_of(Maps()))
    state, _ = fed.run_rounds(gperxan(Maps(), optax.sgd(RATE)), variables, fed.batches_of(SIZES), 2)
    as_tensors = lambda tree: jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf)), tree)  # noqa: E731
    head, norm = (as_tensors(variables["params"][name]) for name in ("head", "norm"))
    one, zero = torch.ones(2, dtype=float), torch.zeros(2, dtype=float)
    shared = [head["kernel"], head["bias"], one, zero, one]
    own = [[norm["scale"], norm["bias"]] for _ in range(2)]
    reference = Reference()
    for _ in range(2):
        each = []
        for k in range(2):
            leaves = shared + own[k]
            for x, y in reference.batches(k):
                leaves = [leaf.detach().requires_grad_() for leaf in leaves]
                kernel, bias, scale, shift, scores, gain, offset = leaves
                x = x.reshape(len(x), 3, 2)
                batch, instance = (
                    (x - x.mean(axes, keepdim=True))
                    / (x.var(axes, keepdim=True, correction=0) + 1e-5).sqrt()
                    for axes in ((0, 1), 1)
                )
                share = scores.softmax(0)
                z = share[0] * (gain * batch + offset) + share[1] * (scale * instance + shift)
                z = z.tanh().mean(1)
                entropy = torch.nn.functional.cross_entropy
                loss = entropy(z @ kernel + bias, y)
                loss = loss + 0.5 * entropy(z @ shared[0].detach() + shared[1].detach(), y)
                grads = torch.autograd.grad(loss, leaves)
                leaves = [leaf - RATE * g for leaf, g in zip(leaves, grads, strict=True)]
            each.append(leaves[:5])
            own[k] = leaves[5:]
        shared = [(2 * a + b) / 3 for a, b in zip(*each, strict=True)]
    found = state.shared["params"]["head"], state.shared["instance_norms"]["norm"]
    ours = [found[0]["kernel"], found[0]["bias"]]
    ours += [found[1][name] for name in ("scale", "bias", "scores")]
    for mine, theirs in zip(ours, shared, strict=True):
        np.testing.assert_allclose(mine, theirs.detach(), rtol=1e-8, atol=1e-11)
    kept = state.personal["params"]["norm"]
    for k in range(2):
        np.testing.assert_allclose(kept["scale"][k], own[k][0].detach(), rtol=1e-8)
        np.testing.assert_allclose(kept["bias"][k], own[k][1].detach(), rtol=1e-8)
    # A prediction normalizes by the client's running statistics and by the image's own.
    mine = fed.client(fed.client_variables(state), 1)
    x = np.random.default_rng(0).normal(size=(4, 3, 2))
    mean, var = (mine["batch_stats"]["norm"][name] for name in ("mean", "var"))
    kernel, bias, scale, shift, scores = (leaf.detach().numpy() for leaf in shared)
    gain, offset = (leaf.detach().numpy() for leaf in own[1])
    batch = gain * (x - mean) / np.sqrt(var + 1e-5) + offset
    instance = scale * (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    share = np.exp(scores) / np.exp(scores).sum()
    z = np.tanh(share[0] * batch + share[1] * (instance + shift)).mean(1)
    found = forward(Maps(), mine, jnp.asarray(x.reshape(4, 6))).outputs
    np.testing.assert_allclose(found, z @ kernel + bias, rtol=1e-8)


def test_a_client_predicts_with_its_own_model_and_an_unseen_one_with_the_shared(x64):
    state = ours_after(ditto(HeadNet(), fed.SGD))
    images = fed.batches_of(SIZES)["image"][0, 0]
    predict = lambda variables: forward(HeadNet(), variables, images).outputs  # noqa: E731
    models = fed.client_variables(state)
    for k in range(2):
        mine = fed.client(models, k)
        fed.assert_close(predict(mine), predict(mine[OWN]["model"]), 0, 0)
        assert np.abs(predict(mine) - predict({"params": mine["params"]})).max() > 1e-3
    unseen = fed.global_variables(state)
    fed.assert_close(predict(unseen), predict({"params": state.shared["params"]}), 0, 0)


@pytest.mark.slow
def test_an_adaptation_of_a_client_with_an_own_model_moves_that_model():
    method = ditto(Maps(), fed.SGD, prepare=lambda x, dtype: x)
    state, _ = fed.run_rounds(method, fed.variables_of(Maps()), fed.batches_of(SIZES), 2)
    mine = fed.client(fed.client_variables(state), 0)
    images = np.asarray(fed.batches_of(SIZES)["image"][0]).reshape(-1, 6)
    ours, expected = (
        predictor(method, model, "tsmobn", batch_size=4)(images)
        for model in (mine, mine[OWN]["model"])
    )
    fed.assert_close(ours, expected, 0, 0)


def test_fedala_weighs_no_frozen_module():
    method = fedala(HeadNet(), fed.SGD, frozen=at("head"))
    with pytest.raises(ValueError, match="fedala:names"):
        fed.run_rounds(method, fed.variables_of(HeadNet()), fed.batches_of(SIZES))
