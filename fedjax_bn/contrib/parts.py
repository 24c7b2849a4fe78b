"""Parts of several methods: layers, places in a network, distances, own models, clients' rows.

A client's own model beside the one that it shares is the collection `own`, see `models.hooks`:
{"model": collections, "present": f[] of 1, ...}. It stays with its client, which predicts with it;
an unseen client, which receives zeros, predicts with the shared model.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.aggregation import Aggregate, ServerState, averaging, equal_messages
from fedjax_bn.arguments.text import names_in
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, LocalStep
from fedjax_bn.methods.learning import method_of
from fedjax_bn.sharing import FROZEN, OWN, STATISTICS, PyTree, Variables, path_names, without
from fedjax_bn.state import Received

# Where the first stages of a residual and of a densely connected network end.
STAGES = (
    ("layer1", "layer2", "layer3"),
    ("transition1/conv", "transition2/conv", "transition3/conv"),
)


def draw_dense(key: jax.Array, inputs: int, outputs: int, dtype: Any) -> PyTree:
    """Returns {"kernel": f[inputs, outputs], "bias": f[outputs]}, drawn as PyTorch does."""
    kernel_key, bias_key = jax.random.split(key)
    bound = inputs**-0.5  # Kaiming's uniform bound with a = sqrt(5)
    return {
        "kernel": jax.random.uniform(kernel_key, (inputs, outputs), dtype, -bound, bound),
        "bias": jax.random.uniform(bias_key, (outputs,), dtype, -bound, bound),
    }


def affine(layer: PyTree, x: jax.Array) -> jax.Array:
    """Returns x W + b in the dtype of x, for a `dense` layer and x f[..., inputs]."""
    return x @ layer["kernel"].astype(x.dtype) + layer["bias"].astype(x.dtype)


def stages_of(
    method: str, variables: Variables, names: str = "", ends: Sequence[tuple[str, ...]] = STAGES
) -> dict[str, int]:
    """Returns path -> channels of the modules that `names` means, without computing anything.

    In names such as "norm1,layer1", "layer1" means the last module with that name or with a name
    that begins with "layer1_". "" means the first tuple of `ends` that the model has, or all batch
    norms if it has none of them. By default these are the ends of the stages layer1 to layer3 of a
    residual network, and the convolutions of a DenseNet's transitions. ValueError if there is none.
    """
    norms = _channels(variables.get(STATISTICS, {}), ("mean",))
    layers = _channels(variables["params"], ("kernel", "scale", "bias"))

    def blocks(inner: dict[str, int]) -> dict[str, int]:
        """Returns block -> channels of the widest layer inside."""
        sizes: dict[str, int] = {}
        for path, size in inner.items():
            while path := path.rpartition("/")[0]:
                sizes[path] = max(size, sizes.get(path, 0))
        return sizes

    # A block has the channels of its widest batch norm; one without any, of its widest layer.
    channels = blocks(layers) | blocks(norms) | layers | norms

    def last(name: str) -> str | None:
        alike = [name] * (name in channels)
        alike += [p for p in channels if p.startswith(f"{name}_") and "/" not in p[len(name) :]]
        # Length first, so that layer1_10 comes after layer1_9.
        return max(alike, key=lambda path: (len(path), path), default=None)

    candidates = [[last(name) for name in end] for end in ([names_in(names)] if names else ends)]
    if not names:
        candidates.append(list(norms))
    places = next((paths for paths in candidates if None not in paths), None)
    if not places:
        problem = f"{method}: {names=} finds no module, nor a batch norm"
        raise ValueError(f"{problem}: name some of {', '.join(channels)}")
    return {place: channels[place] for place in places if place is not None}


def _channels(collection: Variables, leaves: tuple[str, ...]) -> dict[str, int]:
    """Returns path -> size of the last axis, for modules with one of these leaves."""
    channels = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(collection):
        *module, name = path_names(path)
        if name in leaves:
            channels["/".join(module)] = leaf.shape[-1]
    return channels


def require_maps(method: str, places: Collection[str], seen: Collection[str]) -> None:
    """Raises ValueError if no module in `places` has given a map, which `seen` would name."""
    if not seen:
        raise ValueError(f"{method}: {[*places]} give no maps: name others by {method}:names")


def require_images(method: str, x: jax.Array, channels: int) -> None:
    """Raises ValueError if x is not a batch of images f[B, H, W, C] with so many channels."""
    if x.ndim != 4 or x.shape[-1] != channels:
        raise ValueError(f"{method} reads [B,H,W,{channels}], not {x.shape}: set {method}:channels")


def kernel(far: jax.Array, width: jax.Array, ratios: Sequence[float]) -> jax.Array:
    """Returns k f[...] of pairs with these squared distances; the width m passes no gradient."""
    # With a gradient, features could lower the distance just by widening the kernels.
    relative = far / jax.lax.stop_gradient(jnp.where(width > 0, width, 1))
    return sum((jnp.exp(-relative / ratio) for ratio in ratios), jnp.zeros_like(far))


def squared_distances(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns ||x_a - y_b||^2 f[N, M] of all pairs of rows f[N, D] and f[M, D]."""
    norms_x, norms_y = (jnp.square(z).sum(-1) for z in (x, y))
    # Not below 0: rounding could make the distance of equal rows negative.
    return jnp.maximum(norms_x[:, None] + norms_y[None] - 2 * x @ y.T, 0)


def in_row(client: jax.Array | int, rows: jax.Array, value: jax.Array | int) -> jax.Array:
    """Returns zeros like all clients' rows f[K, ...], with `value` in this client's row."""
    return jnp.zeros_like(rows).at[client].set(value)


def exchanging(
    step: LocalStep, mark: str, rows_of: Callable[[Variables, int], PyTree], **options: Any
) -> FederatedMethod:
    """Returns `method_of(step, **options)` whose server keeps a row of each client, and sends all.

    A message has the leaves of the rows, each with the client's row among zeros (`in_row`), and in
    the leaf `mark` f[K] or f[K, N] ones where the client sends something. The server first sends
    `rows_of(variables, num_clients)`.
    """

    def renew(sent: PyTree, aggregate: Aggregate) -> PyTree:
        part = aggregate.message[mark]

        def renewed(before: jax.Array, rows: jax.Array) -> jax.Array:
            share = part.reshape(*part.shape, *(1,) * (before.ndim - part.ndim)).astype(rows.dtype)
            # Both are means over the same n clients, so n cancels.
            return jnp.where(share > 0, rows / jnp.where(share > 0, share, 1), before)

        return {name: renewed(rows, aggregate.message[name]) for name, rows in sent.items()}

    server = averaging(renew=renew, message_weight=equal_messages)
    method = method_of(step, server=server, **options)

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        state = method.init(key, variables, num_clients)
        # Here, because the server's own `init` does not get the number of clients.
        return state._replace(server=ServerState(sent=rows_of(variables, num_clients)))

    return method._replace(init=init)


def with_own_model(variables: Variables, **collections: PyTree) -> Variables:
    """Returns the variables with an own model that equals the shared one, and more of its own."""
    variables = without(variables, OWN)
    present = jnp.ones((), parameter_dtype(variables))
    return {**variables, OWN: {"model": variables, "present": present, **collections}}


def with_model(variables: Variables, model: Variables, **collections: PyTree) -> Variables:
    """Returns the variables with another own model, of which frozen leaves are left out."""
    model = without(model, OWN, FROZEN)
    return {**variables, OWN: {**variables[OWN], "model": model, **collections}}


def of_shared(step: LocalStep) -> LocalStep:
    """Returns the step of the shared model, which neither sees nor changes `own`."""

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        trained, state, loss = step.update(without(variables, OWN), state, batch, received, key)
        return {**trained, OWN: variables[OWN]}, state, loss

    return LocalStep(
        lambda variables: step.init(without(variables, OWN)),
        update,
        lambda variables, *arguments: step.check(without(variables, OWN), *arguments),
    )
