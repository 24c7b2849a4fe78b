"""CSD, JiGen, SelfReg and FedSR: what each adds to the loss, and how it predicts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations as fed
from fedjax_bn import adaptation
from fedjax_bn.contrib import csd, fedsr, selfreg
from fedjax_bn.contrib.csd import decomposed_objective
from fedjax_bn.contrib.fedsr import simple_representation_objective
from fedjax_bn.contrib.jigen import distant_orders, shuffle_tiles
from fedjax_bn.contrib.selfreg import partners_of_class, self_regularized_objective
from fedjax_bn.methods.learning import learning
from fedjax_bn.models import MLP
from fedjax_bn.models.forward import forward
from fedjax_bn.state import Received

KEY, SIZES = jax.random.key(3), (9, 4, 6)
NET = MLP(fed.CLASSES, hidden=(8,))
partners_of_class = jax.jit(partners_of_class)


def random_tree(tree, lowest=-0.9):
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(random.uniform(lowest, 0.9, x.shape)), tree)


def started(method, lowest=-0.9):
    """Random collections in the form of those that a federation starts with."""
    given = fed.variables_of(NET)
    variables = jax.eval_shape(lambda: fed.global_variables(method.init(KEY, given, 1)))
    statistics = jax.tree.map(jnp.abs, random_tree(variables["batch_stats"]))
    return random_tree(variables, lowest) | {"batch_stats": statistics}


def batch_of(size=4):
    batch = {name: leaf[0, 0] for name, leaf in fed.batches_of((size,), batch=5).items()}
    return batch | {"image": jnp.nan_to_num(batch["image"])}


def value_of(objective, variables, batch, key=KEY):
    return jax.jit(lambda w: objective(w, batch, Received((), ()), key)[0])(variables)


def passed(variables, batch):
    """Features and logits of the valid samples in training."""
    plain = {name: variables[name] for name in ("params", "batch_stats")}
    options = {"train": True, "valid": batch["valid"], "wanted": ["features"]}
    out = jax.jit(lambda w: forward(NET, w, batch["image"], **options))(plain)
    real = np.asarray(batch["valid"])
    return np.asarray(out.features)[real], np.asarray(out.outputs)[real]


def entropy(logits, label):
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return -logs[np.arange(len(label)), label].mean()


def test_csds_objective_is_its_formula_and_w_0_is_the_models_classifier(x64):
    variables, batch = started(csd(NET, fed.SGD, directions=2)), batch_of()
    ours = value_of(decomposed_objective(learning(NET)[0], 0.5, 2.0), variables, batch)
    f, common = passed(variables, batch)
    y = np.asarray(batch["label"])[np.asarray(batch["valid"])]
    layers, e = variables["specific"], np.tanh(variables["domain"]["weights"])
    kernels = np.concatenate([variables["params"]["head"]["kernel"][None], layers["kernel"]])
    biases = np.concatenate([variables["params"]["head"]["bias"][None], layers["bias"]])
    shares = np.concatenate([np.tanh(layers["common"])[None], e])
    mine = f @ np.tensordot(shares, kernels, 1) + shares @ biases
    gram = np.stack([kernels[:, :, c] @ kernels[:, :, c].T for c in range(fed.CLASSES)])
    expected = entropy(common, y) + 0.5 * entropy(mine, y) + 2 * np.square(gram - np.eye(3)).mean()
    np.testing.assert_allclose(ours, expected, rtol=1e-10)


def test_orders_are_permutations_that_agree_in_at_most_one_place():
    table = distant_orders(71)
    np.testing.assert_array_equal(table[0], np.arange(9))
    np.testing.assert_array_equal(np.sort(table, 1), np.tile(np.arange(9), (72, 1)))
    agree = (table[:, None] == table[None]).sum(-1)
    assert (agree[~np.eye(72, dtype=bool)] <= 1).all()
    np.testing.assert_array_equal(distant_orders(30), table[:31])


@pytest.mark.parametrize(("high", "wide"), [(6, 9), (7, 11)])
def test_tiles_put_back_give_the_image(high, wide):
    images = np.random.default_rng(0).normal(size=(4, high, wide, 2)).astype(np.float32)
    tiles = np.asarray(distant_orders(71)[[0, 5, 40, 71]])
    shuffle = jax.jit(shuffle_tiles)
    shuffled = shuffle(images, jnp.asarray(tiles))
    np.testing.assert_array_equal(shuffled[0], images[0])
    assert all((a != b).any() for a, b in zip(shuffled[1:], images[1:], strict=True))
    first = tiles[1][0]  # the tile that stands at the first place
    h, w = high // 3, wide // 3
    row, column = divmod(int(first), 3)
    expected = images[1, row * h : (row + 1) * h, column * w : (column + 1) * w]
    np.testing.assert_array_equal(shuffled[1, :h, :w], expected)
    back = shuffle(shuffled, jnp.asarray(np.argsort(tiles, 1)))
    np.testing.assert_array_equal(back, images)


def test_partners_are_a_permutation_of_each_class_of_valid_samples():
    random = np.random.default_rng(0)
    for seed in range(5):
        label = random.integers(0, 3, 12).astype(np.int32)
        valid = random.random(12) < 0.7
        found = np.asarray(
            partners_of_class(jax.random.key(seed), jnp.asarray(label), jnp.asarray(valid))
        )
        np.testing.assert_array_equal(np.sort(found), np.arange(12))
        np.testing.assert_array_equal(valid[found], valid)
        np.testing.assert_array_equal(label[found][valid], label[valid])
    assert (found != np.arange(12)).any()


def test_selfregs_objective_is_pytorchs(x64):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    variables, batch = started(selfreg(NET, fed.SGD)), batch_of()
    ours = value_of(self_regularized_objective(learning(NET)[0], 0.3, 0.5), variables, batch)
    f, o = (torch.tensor(x) for x in passed(variables, batch))
    y = torch.tensor(np.asarray(batch["label"])[:4])
    q = f
    for i in (1, 2, 3):
        layer = jax.tree.map(
            lambda x: torch.tensor(np.asarray(x)), variables["projection"][f"layer{i}"]
        )
        q = functional.batch_norm(
            q @ layer["kernel"] + layer["dense_bias"], None, None, layer["scale"], layer["bias"],
            training=True,
        )  # fmt: skip
        q = q if i == 3 else torch.relu(q)
    *keys, share = jax.random.split(jax.random.fold_in(KEY, 12), 3)
    pair = [np.asarray(partners_of_class(k, batch["label"], batch["valid"]))[:4] for k in keys]
    two, three = map(torch.tensor, pair)
    lam = float(jax.jit(lambda key: jax.random.beta(key, 0.5, 0.5, (), float))(share))
    mse = functional.mse_loss
    o3, q3 = (lam * x[two] + (1 - lam) * x[three] for x in (o, q))
    ce = functional.cross_entropy(o, y.long())
    gaps = lam * (mse(o, o[two]) + 0.3 * mse(f, q[two]))
    gaps += (1 - lam) * (mse(o, o3) + 0.3 * mse(f, q3))
    np.testing.assert_allclose(ours, ce + torch.clamp(ce, max=1.0) * gaps, rtol=1e-9)


def test_the_objective_and_its_gradient_are_pytorchs(x64):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    variables = started(fedsr(NET, fed.SGD), 0.1)
    batch = {name: leaf[0, 0] for name, leaf in fed.batches_of((3,)).items()}
    batch["image"] = jnp.nan_to_num(batch["image"])
    objective = simple_representation_objective(learning(NET)[0], 0.3, 0.2)
    trained = {name: variables[name] for name in ("params", "latent", "reference")}
    (value, (loss, _)), gradients = jax.jit(
        jax.value_and_grad(
            lambda t: objective({**variables, **t}, batch, Received((), ()), KEY), has_aux=True
        )
    )(trained)

    w = jax.tree.map(lambda x: torch.tensor(np.asarray(x), requires_grad=True), trained)
    params, layers, reference = (w[name] for name in ("params", "latent", "reference"))
    affine = lambda x, layer: x @ layer["kernel"] + layer["bias"]  # noqa: E731
    x, y = (torch.tensor(np.asarray(batch[name][:3])) for name in ("image", "label"))
    f = affine(x, params["dense1"])
    f = torch.relu(
        functional.batch_norm(
            f, None, None, params["norm1"]["scale"], params["norm1"]["bias"], training=True
        )
    )
    mu, s = affine(f, layers["mean"]), functional.softplus(affine(f, layers["deviation"]))
    noise = jax.random.normal(jax.random.fold_in(KEY, 2**31 + 2), (4, 8), float)[:3]
    z = mu + s * torch.tensor(np.asarray(noise))
    entropy = functional.cross_entropy(affine(z, params["head"]), y.long())
    of = torch.distributions.Normal
    c, r = reference["scale"], functional.softplus(reference["spread"])[y.long()]
    kl = torch.distributions.kl_divergence(of(c * mu, c * s), of(reference["mean"][y.long()], r))
    total = entropy + 0.3 * z.norm(dim=1).mean() + 0.2 * kl.sum(1).mean()
    total.backward()

    np.testing.assert_allclose(loss, entropy.item(), rtol=1e-10)
    np.testing.assert_allclose(value, total.item(), rtol=1e-10)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs.grad, rtol=1e-8, atol=1e-12),
        gradients,
        w,
    )


def test_predictions_are_the_mean_probabilities_of_20_draws(x64):
    variables = started(fedsr(NET, fed.SGD), 0.1)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 6)))
    logits, _ = jax.jit(adaptation.running(NET).predict)(variables, (), x)
    plain = {name: variables[name] for name in ("params", "batch_stats")}

    read = jax.jit(lambda plain: forward(NET, plain, x, wanted=["features"]).features)
    f, latent = np.asarray(read(plain)), variables["latent"]
    mean, raw = (f @ latent[n]["kernel"] + latent[n]["bias"] for n in ("mean", "deviation"))
    deviation = np.log1p(np.exp(raw))
    noise = jax.random.normal(jax.random.key(20221128), (20, 1, 8), float)
    head = variables["params"]["head"]
    z = np.asarray((mean + deviation * noise) @ head["kernel"] + head["bias"])
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    np.testing.assert_allclose(np.exp(logits), p.mean(0), rtol=1e-10)
