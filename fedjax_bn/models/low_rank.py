"""Low-rank factors on the dense layers of any model (Hu et al., ICLR 2022, LoRA).

    model = lora(ViTS16(3), rank=8, where=lambda path: path.endswith("qkv"))
    variables = model.init(key, images)  # or with_factors(key, model, loaded, images)
    method = fedavg(model, optax.sgd(0.1), frozen=all_but_factors("head"))

A layer x W + b computes x W + b + (x A) B (Eq. 3, with alpha = r) with A f[inputs, r] and
B f[r, outputs]. B starts at 0, so that the model is unchanged at the start. A and B are parameters
beside the layer's kernel; `merged` adds A B to the kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_bn.arguments.ranges import Units, bounded
from fedjax_bn.engine.keys import stream
from fedjax_bn.models.classifier import Wrapped
from fedjax_bn.models.layers import fan_in_uniform
from fedjax_bn.normalization.calls import Call, intercepting, network_name, shapes_of
from fedjax_bn.sharing import PyTree, SharingRule, Variables, all_but, path_names

FACTORS = ("lora_a", "lora_b")


@dataclass(frozen=True)
class _LowRank(Wrapped):
    rank: int
    where: Callable[[str], bool]

    def init(self, key: jax.Array, images: jax.Array, **options: Any) -> Variables:
        """Returns the network's initial variables with factors."""
        return with_factors(key, self, self.network.init(key, images, **options), images)

    def apply(self, variables: Variables, images: jax.Array, **options: Any) -> Any:
        """Applies the network; each layer with factors adds their product."""
        plain, factors = _parts(variables)

        def added(function: Callable, call: Call, args: tuple, kwargs: dict) -> jax.Array:
            # The input may be given by name.
            y, x = function(*args, **kwargs), args[0] if args else next(iter(kwargs.values()))
            a, b = factors[call.path]
            # As the layer itself promotes its input and kernel, also in half precision.
            x, a, b = nn.dtypes.promote_dtype(x, a, b)
            return y + (x @ a @ b).astype(y.dtype)

        def has_factors(call: Any) -> bool:
            return call.is_dense and call.path in factors

        with intercepting(added, has_factors, reads_outputs=False):
            return self.network.apply(plain, images, **options)


@bounded
def lora(model: Any, *, rank: Units, where: Callable[[str], bool]) -> _LowRank:
    """Returns the model with factors of a rank on some dense layers, with `init` and `apply`.

    Args:
      model: a linen module, or the result of `from_nnx`.
      rank: r, the number of columns of A.
      where: chooses `nn.Dense` and `nnx.Linear` by their path, such as "block0/qkv".
    """
    return _LowRank(model, rank, where)


def with_factors(
    key: jax.Array, model: _LowRank, variables: Variables, images: jax.Array | jax.ShapeDtypeStruct
) -> Variables:
    """Adds factors to the variables of the network in `model`, such as pretrained ones.

    A is drawn as the kernel of PyTorch's `Linear`, as in the authors' code, and B is 0. `variables`
    are the collections of the network, in whose dtypes the factors are made; of the images
    f[B, ...] only the shape counts. A `where` that chooses no dense layer raises ValueError.
    """
    kernels: dict[tuple[str, ...], jax.ShapeDtypeStruct] = {}

    def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        kernels[call.path] = jax.ShapeDtypeStruct(call.kernel.shape, call.kernel.dtype)
        return function(*args, **kwargs)

    # Only a trace tells which modules are dense layers, in linen as in nnx.
    with intercepting(note, lambda call: call.is_dense):
        shapes_of(model.network, variables, images)
    chosen = [path for path in sorted(kernels) if model.where("/".join(path))]
    if not chosen:
        layers = ", ".join(map("/".join, sorted(kernels))) or "none"
        raise ValueError(f"where chooses none of {network_name(model)}'s dense layers: {layers}")
    params = flatten_dict(variables["params"])
    keys = jax.random.split(stream(key, "low-rank factors"), len(chosen))
    for factor_key, path in zip(keys, chosen, strict=True):
        (inputs, outputs), dtype = kernels[path].shape, kernels[path].dtype
        params[*path, FACTORS[0]] = fan_in_uniform(factor_key, (inputs, model.rank), dtype)
        # B is 0, so that the model starts as the pretrained one.
        params[*path, FACTORS[1]] = jnp.zeros((model.rank, outputs), dtype)
    return {**variables, "params": unflatten_dict(params)}


def merged(variables: Variables) -> Variables:
    """Returns the variables of the plain network, with A B added to the kernels.

    `variables` are the collections of a model made by `lora`.
    """
    plain, factors = _parts(variables)
    leaves = flatten_dict(plain["params"])
    for path, (a, b) in factors.items():
        leaves[*path, "kernel"] += a @ b
    return {**plain, "params": unflatten_dict(leaves)}


def all_but_factors(*paths: str) -> SharingRule:
    """Returns the rule for `frozen=` that is True for all leaves but factors and some modules.

    `paths` are modules that are trained as well, such as "head"; using the rule raises ValueError
    if one is not in the variables.
    """
    rule = all_but(*paths)

    def frozen(variables: Variables) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, outside: outside and path_names(path)[-1] not in FACTORS, rule(variables)
        )

    return frozen


def _parts(variables: Variables) -> tuple[Variables, dict[tuple, tuple[jax.Array, jax.Array]]]:
    """The network's variables, and path of a layer -> its factors (A, B)."""
    leaves = flatten_dict(variables["params"])
    layers = [path[:-1] for path in leaves if path[-1] == FACTORS[0]]
    factors = {layer: (leaves[*layer, "lora_a"], leaves[*layer, "lora_b"]) for layer in layers}
    plain = {path: leaf for path, leaf in leaves.items() if path[-1] not in FACTORS}
    return {**variables, "params": unflatten_dict(plain)}, factors
