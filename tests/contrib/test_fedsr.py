"""FedSR: its objective by PyTorch, its divergence, its predictions, and what it reduces to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations as fed
from fedjax_bn import adaptation
from fedjax_bn.contrib import fedsr
from fedjax_bn.contrib.fedsr import simple_representation_objective
from fedjax_bn.methods.learning import learning
from fedjax_bn.models import MLP
from fedjax_bn.models.forward import forward
from fedjax_bn.state import Received

KEY, SIZES = jax.random.key(3), (9, 4, 6)
NET = MLP(fed.CLASSES, hidden=(8,))


def random_tree(tree, seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.uniform(0.1, 0.9, x.shape)), tree)


def started(**options):
    """Random collections in the form of those that a federation starts with."""
    method, given = fedsr(NET, fed.SGD, **options), fed.variables_of(NET)
    form = jax.eval_shape(lambda: fed.global_variables(fed.begun(method, KEY, given, 1)))
    return random_tree(form)


@pytest.mark.parametrize("squared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_objective_and_its_gradient_are_pytorchs(x64, squared):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    variables = started()
    batch = {name: leaf[0, 0] for name, leaf in fed.batches_of((3,)).items()}
    batch["image"] = jnp.nan_to_num(batch["image"])
    objective = simple_representation_objective(learning(NET)[0], 0.3, 0.2, squared=squared)
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
    norm = z.pow(2).sum(1) if squared else z.norm(dim=1)
    total = entropy + 0.3 * norm.mean() + 0.2 * kl.sum(1).mean()
    total.backward()

    np.testing.assert_allclose(loss, entropy.item(), rtol=1e-10)
    np.testing.assert_allclose(value, total.item(), rtol=1e-10)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs.grad, rtol=1e-8, atol=1e-12),
        gradients,
        w,
    )


def test_predictions_are_the_mean_probabilities_of_20_draws(x64):
    variables, x = started(), jnp.asarray(np.random.default_rng(1).normal(size=(5, 6)))
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


def test_what_travels_is_the_latent_and_never_the_reference():
    state, _ = fed.run_rounds(fedsr(NET, fed.SGD), fed.variables_of(NET), fed.batches_of(SIZES))
    assert state.personal["latent"] == jax.tree.map(lambda leaf: None, state.shared["latent"])
    assert set(jax.tree.leaves(state.shared["reference"])) == set()
    own = fed.client_variables(state)["reference"]
    assert own["mean"].shape == (3, fed.CLASSES, 8)
    assert (own["mean"][0] != own["mean"][1]).any()


def test_without_noise_there_is_no_deviation_and_a_divergence_is_refused():
    start = started(noise=False, cmi=0.0)
    assert set(start["latent"]) == {"mean"}
    assert "reference" not in start
    with pytest.raises(ValueError, match="cmi"):
        fedsr(NET, fed.SGD, noise=False)
