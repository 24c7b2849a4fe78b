"""RandAugment: each operation beside Pillow's, and how they are drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from fedjax_bn.data.pixels.augment import OPERATIONS, randaug

KEY = jax.random.key(0)
STRENGTHS = (0.0, 0.3, -0.3, 1.0, -0.85)


def image_of(seed=0, high=24, wide=31):
    """Smooth shapes, some noise, not all levels."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:high, :wide]
    waves = [np.sin(x / a + y / b) for a, b in random.uniform(3, 12, (3, 2))]
    values = 110 + 70 * np.stack(waves, -1) + random.normal(0, 9, (high, wide, 3))
    return np.clip(values, 5, 231).astype(np.uint8)


def moved(image, rows, columns):
    """Pillow's affine map, nearest pixels."""
    return image.transform(image.size, Image.Transform.AFFINE, (*columns, *rows), Image.NEAREST)


def enhanced(kind):
    return lambda image, s: getattr(ImageEnhance, kind)(image).enhance(1 + 0.9 * s)


PILLOW = {
    "identity": lambda image, s: image,
    "shear_x": lambda image, s: moved(image, (0, 1, 0), (1, 0.3 * s, 0)),
    "shear_y": lambda image, s: moved(image, (0.3 * s, 1, 0), (1, 0, 0)),
    "translate_x": lambda image, s: moved(image, (0, 1, 0), (1, 0, int(150 / 331 * 31 * s))),
    "translate_y": lambda image, s: moved(image, (0, 1, int(150 / 331 * 24 * s)), (1, 0, 0)),
    "rotate": lambda image, s: image.rotate(30 * s),
    "brightness": enhanced("Brightness"),
    "color": enhanced("Color"),
    "contrast": enhanced("Contrast"),
    "sharpness": enhanced("Sharpness"),
    "posterize": lambda image, s: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    "solarize": lambda image, s: ImageOps.solarize(image, 255 * (1 - abs(s))),
    "autocontrast": lambda image, s: ImageOps.autocontrast(image),
    "equalize": lambda image, s: ImageOps.equalize(image),
}
EXACT = {"identity", "translate_x", "translate_y", "posterize", "solarize", "equalize"}


@jax.jit
def changed_by_all(image, strength):
    """One program for all operations."""
    return {name: operation(image, strength) for name, operation in OPERATIONS.items()}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_pillows_on_bytes(name):
    image = image_of()
    for strength in STRENGTHS:
        expected = np.asarray(PILLOW[name](Image.fromarray(image), strength), int)
        found = np.asarray(changed_by_all(image, strength)[name], int)
        away = abs(found - expected)
        if name in ("shear_x", "shear_y", "rotate"):  # a nearest pixel on the edge of two
            assert (away > 0).any(-1).mean() < 0.01
        else:
            assert away.max() <= (name not in EXACT), (strength, away.max())


def test_every_image_of_a_batch_has_operations_of_its_own():
    images = jnp.asarray(np.stack(64 * [image_of()]))
    augment = jax.jit(randaug(ops=1, magnitude=30))
    changed = np.asarray(augment(KEY, images))
    assert (changed.dtype, changed.shape) == (np.uint8, images.shape)
    kinds = {one.tobytes() for one in changed}
    # 14 operations, of which 10 have a sign that shows.
    assert 14 < len(kinds) <= 24
    np.testing.assert_array_equal(augment(KEY, images), changed)
