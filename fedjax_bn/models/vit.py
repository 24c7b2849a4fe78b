"""Vision transformers (Dosovitskiy et al. 2021) and ConvNeXt (Liu et al. 2022), as timm has them.

Names of layers, initial values, the exact GELU and the layer norms' epsilon of 1e-6 are timm's.
There are layer norms only, and neither dropout nor stochastic depth, whose rates are 0 in timm.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import AtLeast0, Channels, Units, bounded
from fedjax_bn.models.layers import Classifier, Network, variant

# timm cuts its normal distribution at +-2, which is 100 standard deviations.
_normal = nn.initializers.normal(0.02)
_TIMMS: dict[str, Any] = {
    "kernel_init": _normal,
    "use_bias": True,
    "bias_init": nn.initializers.zeros,
}


def _dense(net: Network, features: int, name: str | None = None) -> nn.Dense:
    """A dense layer with timm's initial weights; its bias starts at 0."""
    return nn.Dense(features, kernel_init=_normal, param_dtype=net.param_dtype, name=name)


def _layer_norm(net: Network, x: jax.Array, name: str) -> jax.Array:
    """Layer norm over the channels of f[..., C]."""
    if net.norm != "batch":
        raise ValueError(f"a network of layer norms has no norm={net.norm!r}: leave it out")
    # Flax's fast variance, E[x^2] - E[x]^2, loses digits.
    layer = nn.LayerNorm(1e-6, use_fast_variance=False, param_dtype=net.param_dtype, name=name)
    with jax.numpy_dtype_promotion("standard"):  # flax's layer mixes bfloat16 and float32
        return layer(x)


def _perceptron(net: Network, x: jax.Array, hidden: int) -> jax.Array:
    """Dense, exact GELU, dense: f[..., C] -> f[..., C]."""
    x, width = nn.gelu(_dense(net, hidden, "fc1")(x), approximate=False), x.shape[-1]
    return _dense(net, width, "fc2")(x)


class _LayerScale(Network):
    """Multiplies each channel by a learned factor (Touvron et al. 2021)."""

    initial: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[..., C] -> f[..., C]."""
        constant = nn.initializers.constant(self.initial)
        gamma = self.param("gamma", constant, x.shape[-1:], self.param_dtype)
        x, gamma = nn.dtypes.promote_dtype(x, gamma)
        return x * gamma


class _Block(Network):
    """Attention and a perceptron, each after a layer norm and added to its input."""

    heads: int
    layer_scale: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, T, C] -> f[B, T, C]."""
        x = x + self._scaled(self._attention(_layer_norm(self, x, "norm1")), "ls1")
        y = _perceptron(self, _layer_norm(self, x, "norm2"), 4 * x.shape[-1])
        return x + self._scaled(y, "ls2")

    @nn.nowrap
    def _scaled(self, x: jax.Array, name: str) -> jax.Array:
        return self.part(_LayerScale, self.layer_scale, name=name)(x) if self.layer_scale else x

    @nn.nowrap
    def _attention(self, x: jax.Array) -> jax.Array:
        """Self-attention of f[B, T, C] by queries, keys and values of one dense layer."""
        batch, tokens, width = x.shape
        parts = _dense(self, 3 * width, "qkv")(x)
        # timm's order in its one dense layer: query, key and value, then heads.
        parts = parts.reshape(batch, tokens, 3, self.heads, width // self.heads)
        # Not jax.nn.dot_product_attention, whose softmax is in float32 for float64 too.
        y = nn.dot_product_attention(*jnp.moveaxis(parts, 2, 0))
        return _dense(self, width, "proj")(y.reshape(x.shape))


@bounded
class ViT(Classifier):
    """Embeds patches, adds a class token and positions, applies blocks of attention, classifies.

    Attributes:
      width: channels C of a token, a multiple of `heads`.
      depth: number of blocks.
      heads: number of attention heads.
      patch: side of a patch in pixels.
      image_size: side, a multiple of `patch`, of the images for which the position embedding has
        one vector a patch. For other images it is resized by cubic interpolation in each pass, as
        by timm's `dynamic_img_size=True`.
      layer_scale: initial factor of the branches' channels, 0 for a network without factors.
    """

    num_classes: int = 10
    width: Channels = 384
    depth: Units = 12
    heads: Units = 6
    patch: Units = 16
    image_size: Units = 224
    layer_scale: AtLeast0 = 0.0

    def setup(self) -> None:
        """Makes the classifier."""
        if self.width % self.heads or self.image_size % self.patch:
            pairs = f"width={self.width}, and patch={self.patch} image_size={self.image_size}"
            raise ValueError(f"heads={self.heads} must divide {pairs}")
        self.head = _dense(self, self.num_classes)

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, 3] -> f[B, C], the class token after the last layer norm."""
        self.require_sides(images, self.patch)
        x = self.convolve(
            images, self.width, self.patch, self.patch, use_bias=True, name="patch_embed"
        )
        size = self.image_size // self.patch
        shape, dtype = (1, 1 + size**2, self.width), self.param_dtype
        token = self.param("cls_token", nn.initializers.normal(1e-6), (1, 1, self.width), dtype)
        positions = self.param("pos_embed", _normal, shape, dtype)
        # In each pass, so that the parameters do not depend on the size of the images.
        positions = _resized(positions, size, x.shape[1:3])
        x, token, positions = nn.dtypes.promote_dtype(x, token, positions)
        x = x.reshape(len(x), -1, self.width)
        token = jnp.broadcast_to(token, (len(x), 1, self.width))
        x = jnp.concatenate([token, x], 1) + positions
        for i in range(self.depth):
            x = self.part(_Block, self.heads, self.layer_scale, name=f"block{i}")(x)
        return _layer_norm(self, x, "norm")[:, 0]


def _resized(positions: jax.Array, size: int, shape: Sequence[int]) -> jax.Array:
    """Resizes f[1, 1 + size^2, C], the class token's vector first, to a grid of `shape` patches."""
    if tuple(shape) == (size, size):
        return positions
    token, grid = positions[:, :1], positions[:, 1:]
    width = positions.shape[-1]
    # Keys' cubic kernel with a = -0.5, antialiased, as in PyTorch with antialias=True.
    grid = jax.image.resize(grid.reshape(1, size, size, width), (1, *shape, width), "cubic")
    return jnp.concatenate([token, grid.reshape(1, -1, width)], 1)


ViTS16 = variant(ViT, "ViTS16", "ViT-S/16, timm's vit_small_patch16_224: 384 features")
ViTB16 = variant(
    ViT, "ViTB16", "ViT-B/16, timm's vit_base_patch16_224: 768 features", width=768, heads=12
)
DINOv2S14 = variant(
    ViT,
    "DINOv2S14",
    """DINOv2's ViT-S/14 (Oquab et al. 2023), timm's vit_small_patch14_dinov2: 384 features.

    Its files have no classifier, and 37x37 positions, for images of 518x518""",
    patch=14,
    image_size=518,
    layer_scale=1e-5,
)


class _ConvNeXtBlock(Network):
    """7x7 convolution of each channel, layer norm, perceptron and layer scale, plus the input."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, C]."""
        channels = x.shape[-1]
        y = self.convolve(
            x, channels, 7, padding=3, feature_group_count=channels, name="conv_dw", **_TIMMS
        )
        y = _perceptron(self, _layer_norm(self, y, "norm"), 4 * channels)
        return x + self.part(_LayerScale, 1e-6, name="ls")(y)


@bounded
class ConvNeXt(Classifier):
    """A stem that quarters the map, stages of blocks that halve it, mean, layer norm, classifier.

    Attributes:
      width: channels of the first stage; each further one has twice as many.
      depths: number of blocks in each stage.
    """

    num_classes: int = 10
    width: Channels = 96
    depths: Sequence[int] = (3, 3, 9, 3)

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = _dense(self, self.num_classes)

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, F], the normalized mean of the last map over its pixels."""
        x = self._reduced(images, self.width, 4, "stem_conv")
        x = _layer_norm(self, x, "stem_norm")
        for stage, depth in enumerate(self.depths):
            if stage:
                x = _layer_norm(self, x, f"down{stage}_norm")
                x = self._reduced(x, self.width * 2**stage, 2, f"down{stage}_conv")
            for block in range(depth):
                x = self.part(_ConvNeXtBlock, name=f"stage{stage}_block{block}")(x)
        return _layer_norm(self, x.mean((1, 2)), "norm")

    @nn.nowrap
    def _reduced(self, x: jax.Array, width: int, factor: int, name: str) -> jax.Array:
        """Convolves disjoint windows, f[B, H, W, C] -> f[B, H // factor, W // factor, width]."""
        return self.convolve(x, width, factor, factor, name=name, **_TIMMS)


ConvNeXtT = variant(ConvNeXt, "ConvNeXtT", "ConvNeXt-T, timm's convnext_tiny: 768 features")
