"""Small networks whose batch norms see maps and vectors, and values for their variables."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.normalization import BatchNorm

CLASSES = 4


class Block(nn.Module):
    """A 1x1 convolution (a dense layer compiles sooner) and a batch norm, one level down."""

    channels: int

    @nn.compact
    def __call__(self, x):
        return nn.relu(BatchNorm(name="inner")(nn.Dense(self.channels, name="conv")(x)))


class HandMade(nn.Module):
    """Two batch norms with maps, one with vectors; made by nobody who knows of adaptations."""

    @nn.compact
    def __call__(self, images):
        x = Block(8, name="block")(images)
        x = nn.relu(BatchNorm(name="middle")(nn.Dense(16, name="conv")(x[:, ::2, ::2])))
        x = nn.relu(BatchNorm(name="last")(nn.Dense(8, name="dense")(x.mean((1, 2)))))
        return nn.Dense(CLASSES, name="out")(x)


class Remat(nn.Module):
    """The same layers behind `nn.remat`, which lifts what happens inside."""

    @nn.compact
    def __call__(self, images):
        x = nn.remat(Block)(8, name="block")(images)
        return nn.Dense(CLASSES, name="out")(x.mean((1, 2)))


def images_of(count, seed=0, shape=(6, 6, 3)):
    random = np.random.default_rng(seed)
    scale, shift = random.uniform(0.5, 2, (2, count, 1, 1, 1))
    return jnp.asarray(shift + scale * random.normal(size=(count, *shape)), jnp.result_type(float))


def variables_of(model, images, seed=0):
    """Distinct values in every leaf, variances positive."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.asarray(images, np.float32))
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    random, made = np.random.default_rng(seed), []
    for path, leaf in leaves:
        value = random.normal(size=leaf.shape) / np.sqrt(max(np.prod(leaf.shape[:-1]), 1))
        if path[-1].key in ("var", "scale"):
            value = random.uniform(0.5, 2, leaf.shape)
        made.append(jnp.asarray(value, images.dtype))
    return jax.tree.unflatten(structure, made)
