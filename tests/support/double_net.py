"""Networks of float64 that a configuration can name, in a process of its own too."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp

from fedjax_bn.normalization import BatchNorm


class DoubleNet(nn.Module):
    """A batch norm over maps of three positions and two dense layers, whatever it is given."""

    num_classes: int = 3

    def parts(self, x):
        return x.reshape(-1, 3, 2)

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, param_dtype=jnp.float64, name="in")(self.parts(x.astype(jnp.float64)))
        x = nn.relu(BatchNorm(param_dtype=jnp.float64, name="norm")(x))
        x = x.mean(1) if x.ndim == 3 else x
        return nn.Dense(self.num_classes, param_dtype=jnp.float64, name="out")(x)


class DoubleImageNet(DoubleNet):
    """The same over vectors, for images of any size."""

    num_classes: int = 10

    def parts(self, x):
        return x.reshape(len(x), -1)


class DoublePixels(nn.Module):
    """A batch norm between two convolutions of single pixels; gives logits of each pixel."""

    num_classes: int = 3

    @nn.compact
    def __call__(self, x):
        single = partial(nn.Conv, kernel_size=(1, 1), param_dtype=jnp.float64)
        x = single(4, name="in")(x.astype(jnp.float64))
        x = nn.relu(BatchNorm(param_dtype=jnp.float64, name="norm")(x))
        return single(self.num_classes, name="out")(x)
