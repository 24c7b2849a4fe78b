"""Sharing rules decide by module and collection."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from federations import NormNet, PlainNet, assert_equal, variables_of
from fedjax_bn import sharing
from fedjax_bn.adaptation import tsmobn
from fedjax_bn.models import from_nnx
from fedjax_bn.normalization import BatchNorm

OF_NORMS = (sharing.all_but_batch_norm, sharing.all_but_statistics, sharing.all_but_norms)
RULES = (sharing.everything, sharing.nothing, *OF_NORMS)


class Nested(nn.Module):
    """A batch norm without affine inside a submodule called kernel, one at the top."""

    @nn.compact
    def __call__(self, x):
        x = NormNet(name="kernel")(x)
        x = BatchNorm(name="scale", use_scale=False, use_bias=False)(x)
        return nn.Dense(3, name="batch_stats")(x)


def paths(tree, mask, wanted):
    pairs = zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(mask), strict=True)
    return {
        jax.tree_util.keystr(p, simple=True, separator="/") for (p, _), m in pairs if m == wanted
    }


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", [NormNet(), Nested()])
def test_split_and_join_are_inverse(rule, model):
    variables = variables_of(model)
    shared, personal = sharing.split(variables, rule(variables))
    assert_equal(sharing.join(shared, personal), variables)
    assert_equal(sharing.split_like(variables, shared), (shared, personal))
    counts = [len(jax.tree.leaves(tree)) for tree in (shared, personal, variables)]
    assert counts[0] + counts[1] == counts[2]


def test_fedbn_keeps_exactly_the_leaves_of_batch_norms_whatever_their_names():
    variables = variables_of(Nested())
    assert paths(variables, sharing.all_but_batch_norm(variables), False) == {
        f"{collection}/{layer}/{leaf}"
        for layer in ("kernel/a", "kernel/b")
        for collection, leaf in (
            ("params", "scale"),
            ("params", "bias"),
            ("batch_stats", "mean"),
            ("batch_stats", "var"),
        )
    } | {"batch_stats/scale/mean", "batch_stats/scale/var"}
    assert paths(variables, sharing.all_but_statistics(variables), False) == {
        f"batch_stats/{layer}/{leaf}"
        for layer in ("kernel/a", "kernel/b", "scale")
        for leaf in ("mean", "var")
    }


def test_all_but_norms_keeps_every_norm_of_linen_and_nnx():
    class Every(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.RMSNorm(name="c")(nn.LayerNorm(name="a")(nn.Dense(4, name="dense")(x)))
            return BatchNorm(name="d")(nn.GroupNorm(2, name="b")(x)) * self.param(
                "scales", nn.initializers.ones, (4,)
            )

    class InNnx(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.LayerNorm(4, rngs=rngs), nnx.GroupNorm(4, num_groups=2, rngs=rngs)
            self.c, self.d = nnx.RMSNorm(4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
            self.dense = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.d(self.c(self.b(self.a(self.dense(x)))))

    for model in (Every(), from_nnx(InNnx(nnx.Rngs(0)))):
        variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 4)))
        mask = sharing.all_but_norms(variables)
        kept = {path.split("/")[1] for path in paths(variables, mask, False)}
        travel = {path.split("/")[1] for path in paths(variables, mask, True)}
        assert kept == {"a", "b", "c", "d"}
        assert travel == {"dense"} | ({"scales"} if isinstance(model, Every) else set())


class SpectralNet(nn.Module):
    """A spectral norm, whose u and sigma are in batch_stats too."""

    norm: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.SpectralNorm(nn.Dense(3))(x, update_stats=False)
        return nn.BatchNorm(use_running_average=True, name="bn")(x) if self.norm else x


@pytest.mark.parametrize("rule", OF_NORMS)
@pytest.mark.parametrize("model", [PlainNet(), SpectralNet()])
def test_rules_about_batch_norm_raise_without_one(rule, model):
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="share=everything"):
        rule(variables)


def test_a_batch_norm_beside_a_spectral_norm_is_found_alone_and_adapts():
    model, images = SpectralNet(norm=True), jnp.arange(8.0).reshape(2, 4) ** 2
    variables = jax.jit(model.init)(jax.random.key(0), images)
    assert sharing.batch_norm_paths(variables) == {("bn",)}
    kept = paths(variables, sharing.all_but_batch_norm(variables), False)
    assert {"params/bn/scale", "params/bn/bias"} < kept
    adaptation = tsmobn(model, momentum=0.5)
    outputs, _ = adaptation.predict(variables, adaptation.init(variables), images)
    np.testing.assert_allclose(outputs.mean(0), 0, atol=1e-5)  # the batch's own statistics


def test_the_table_counts_leaves_values_and_bytes():
    variables = variables_of(NormNet())
    text = sharing.describe(variables, sharing.all_but_batch_norm(variables))
    sizes = [leaf.size for leaf in jax.tree.leaves(variables)]
    assert "personal: 8 leaves, 64 values, 256 bytes" in text
    assert f"shared: {len(sizes) - 8} leaves, {sum(sizes) - 64} values" in text
    for layer in ("a", "b", "bn", "norm", "c"):
        assert any(line.split()[:1] == [layer] for line in text.splitlines())
