"""The small reference network and its data, as `oracle/small.npz` stores them (float64)."""

from pathlib import Path

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from fedjax_bn.normalization import BatchNorm

SIZES = (40, 21, 56)
BATCH = 8


class SmallNet(nn.Module):
    """Dense 12 -> 16, batch norm, ReLU, dense 16 -> 4."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(BatchNorm(name="bn1")(nn.Dense(16, name="fc1")(x)))
        return nn.Dense(4, name="fc2")(x)


def load(shared: Path) -> dict[str, np.ndarray]:
    with np.load(shared / "oracle" / "small.npz") as file:
        return dict(file)


def variables_from(values: dict[str, np.ndarray], prefix: str) -> dict:
    """Stored PyTorch-shaped values as linen collections."""

    def get(name: str) -> jnp.ndarray:
        return jnp.asarray(values[f"{prefix}__{name}"])

    dense = {n: {"kernel": get(f"{n}.weight").T, "bias": get(f"{n}.bias")} for n in ("fc1", "fc2")}
    norm = {"scale": get("bn1.weight"), "bias": get("bn1.bias")}
    statistics = {"mean": get("bn1.running_mean"), "var": get("bn1.running_var")}
    return {"params": dense | {"bn1": norm}, "batch_stats": {"bn1": statistics}}


def batches_from(values: dict[str, np.ndarray], steps: int = 7) -> dict[str, jnp.ndarray]:
    """One epoch in order for all clients, batches of 8, padded to the largest client."""
    image = np.zeros((3, steps * BATCH, 12))
    label = np.zeros((3, steps * BATCH), np.int32)
    valid = np.zeros((3, steps * BATCH), bool)
    for k, size in enumerate(SIZES):
        image[k, :size] = values[f"data__x{k}"]
        label[k, :size] = values[f"data__y{k}"]
        valid[k, :size] = True
    shape = (3, steps, BATCH)
    return {
        "image": jnp.asarray(image.reshape(*shape, 12)),
        "label": jnp.asarray(label.reshape(shape)),
        "valid": jnp.asarray(valid.reshape(shape)),
    }
