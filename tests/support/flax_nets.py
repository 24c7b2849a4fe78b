"""One network with our batch norm, with flax linen's own and in nnx; their variables are alike."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import norm_nets as nets
from fedjax_bn.models import from_nnx
from fedjax_bn.normalization import BatchNorm

CLASSES = 2


class Ours(nn.Module):
    """A batch norm with maps and one with vectors, with flax's momentum and biased variance."""

    @nn.compact
    def __call__(self, images):
        x = nn.Dense(4, name="conv")(images)
        x = nn.relu(BatchNorm(0.8, unbiased=False, name="first")(x)).mean((1, 2))
        x = nn.relu(BatchNorm(0.8, unbiased=False, name="last")(nn.Dense(5, name="dense")(x)))
        return nn.Dense(CLASSES, name="out")(x)


class Linen(nn.Module):
    """As users of linen write it: the model hands `use_running_average` on."""

    @nn.compact
    def __call__(self, images, train):
        def norm(x, name):
            return nn.BatchNorm(use_running_average=not train, momentum=0.8, name=name)(x)

        x = nn.relu(norm(nn.Dense(4, name="conv")(images), "first")).mean((1, 2))
        x = nn.relu(norm(nn.Dense(5, name="dense")(x), "last"))
        return nn.Dense(CLASSES, name="out")(x)


class Nnx(nnx.Module):
    """As users of nnx write it."""

    def __init__(self, rngs):
        self.conv = nnx.Linear(3, 4, rngs=rngs)
        self.first = nnx.BatchNorm(4, momentum=0.8, rngs=rngs)
        self.dense = nnx.Linear(4, 5, rngs=rngs)
        self.last = nnx.BatchNorm(5, momentum=0.8, rngs=rngs)
        self.out = nnx.Linear(5, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.first(self.conv(images))).mean((1, 2))
        return self.out(nnx.relu(self.last(self.dense(x))))


MODELS = {"ours": Ours(), "linen": Linen(), "nnx": from_nnx(Nnx(nnx.Rngs(0)))}
THEIRS = ("linen", "nnx")


def images_of(count, seed=0):
    return nets.images_of(count, seed, (2, 3, 3))


def variables_of(seed=0):
    """Values for all of the three."""
    return nets.variables_of(Ours(), images_of(2), seed)


def batches_of(sizes=(4, 3), batch=3, steps=2):
    """[K, S, B] with padding that holds NaN, which must not matter."""
    valid = np.arange(steps * batch) < np.array(sizes)[:, None]
    lead = (len(sizes), steps, batch)
    images = np.stack([images_of(steps * batch, seed) for seed in range(len(sizes))])
    images = np.where(valid[..., None, None, None], images, np.nan)
    label = jax.random.randint(jax.random.key(0), lead, 0, CLASSES, jnp.int32)
    return {
        "image": images.reshape(*lead, *images.shape[2:]),
        "label": label,
        "valid": valid.reshape(lead),
    }
