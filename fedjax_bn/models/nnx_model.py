"""A user's own nnx model in the form in which the library passes batches: init and apply.

model = from_nnx(Net(rngs=nnx.Rngs(0)))
variables = model.init(key, images)
method = fedbn(model, optax.sgd(0.1))
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_bn.normalization.calls import takes_train
from fedjax_bn.normalization.flax_nnx import Recorded, set_value, watch
from fedjax_bn.normalization.layer import RECORDED
from fedjax_bn.sharing import STATISTICS, Variables

PyTree = Any

COLLECTIONS = {"params": nnx.Param, STATISTICS: nnx.BatchStat}


@dataclass(frozen=True)
class NnxModel:
    """An nnx model with the functions `init` and `apply` of a linen one; made by `from_nnx`.

    Its variables are those of a linen model: `params` holds every `nnx.Param` and `batch_stats`
    every `nnx.BatchStat` by its path, dicts in dicts. All else, such as constants, stays as it is
    in `net`. A method `features` or `classify` of `net` is one of the model.

    Attributes:
      net: the model; nobody changes it.
    """

    net: nnx.Module

    def init(self, key: jax.Array, images: jax.Array) -> Variables:
        """The variables of `net` as they are; key and images, which linen needs, do not count."""
        del key, images
        return _collect(self.net, COLLECTIONS)

    def apply(
        self,
        variables: Variables,
        images: jax.Array,
        *,
        train: bool = False,
        mutable: list[str] | tuple[str, ...] = (),
        rngs: dict[str, jax.Array] | None = None,
        method: Callable[..., Any] | None = None,
    ) -> Any:
        """Passes a batch through a fresh copy of `net` with these variables.

        Args:
          variables: collections as from `init`; further ones do not count.
          images: f[B, ...].
          train: whether the copy is in the mode of `net.train()` or of `net.eval()`; handed on to
            what takes it.
          mutable: the collections wanted back, of `batch_stats` and `recorded`.
          rngs: random keys; every stream of `net` gets one of its own from `rngs["dropout"]`.
            Without, streams are where they were when the model was made.
          method: `method(net, images)` in place of `net(images)`.

        Returns:
          The output, and where `mutable` names collections a pair of it and these.

        Raises:
          ValueError: the variables are not those of this model.
        """
        net = nnx.merge(*_split(self.net))
        _fill(net, variables)
        if rngs:
            _reseed(net, rngs["dropout"])
        modes = net.train if train else net.eval
        modes()
        watch(net, moving=STATISTICS in mutable, recording=RECORDED in mutable)
        options = takes_train(method or net.__call__, train)
        output = method(net, images, **options) if method else net(images, **options)
        if not mutable:
            return output
        kinds = COLLECTIONS | {RECORDED: Recorded}
        return output, _collect(net, {name: kinds[name] for name in mutable})

    def __call__(self, images: jax.Array, train: bool = False) -> Any:
        """The model as made, images -> outputs; `apply` is for other variables."""
        return self.apply(self.init(jax.random.key(0), images), images, train=train)

    def __getattr__(self, name: str) -> Any:
        """`features`, `classify` and `classifier_path`, where the net has them."""
        if name in ("features", "classify", "classifier_path"):
            return getattr(self.net, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def from_nnx(net: nnx.Module) -> NnxModel:
    """A model from an nnx module, for every method, sharing rule and adaptation.

    Its `nnx.BatchNorm` are served as ours are, with flax's conventions: momentum 0.99 by default
    and the biased variance as running variance (see `normalization.calls`).

    Args:
      net: images f[B, ...] -> outputs, with its weights; it is copied.

    Raises:
      ValueError: it is no nnx module, or one of its modules has running statistics and no
        `__call__`, so that no statistics rule could reach them.
    """
    if not isinstance(net, nnx.Module):
        raise ValueError(
            f"from_nnx takes an nnx.Module with its weights, such as Net(rngs=nnx.Rngs(0)), "
            f"but got {net!r:.80}"
        )
    for path, module in nnx.iter_graph(net):
        uncalled = isinstance(module, nnx.Module) and not callable(module)
        if uncalled and any(isinstance(leaf, nnx.BatchStat) for leaf in vars(module).values()):
            raise ValueError(
                f"the module {'/'.join(map(str, path))!r} has running statistics and no __call__, "
                "so that no statistics rule reaches them: use flax.nnx.BatchNorm there"
            )
    return NnxModel(nnx.merge(*_split(net)))


def _split(net: nnx.Module) -> tuple[Any, Any]:
    graph, state = nnx.split(net)
    return graph, jax.tree.map(lambda leaf: leaf, state)  # variables of its own


def _leaves(net: nnx.Module) -> Iterator[tuple[tuple[str, ...], nnx.Variable]]:
    for path, node in list(nnx.iter_graph(net)):
        if isinstance(node, nnx.Variable):
            yield tuple(map(str, path)), node


def _collect(net: nnx.Module, kinds: dict[str, type[nnx.Variable]]) -> Variables:
    """The variables of each kind as dicts in dicts; no collection where there is none."""
    collected: Variables = {}
    for path, leaf in _leaves(net):
        for collection, kind in kinds.items():
            if isinstance(leaf, kind):
                *parents, name = (collection, *path)
                tree = collected
                for parent in parents:
                    tree = tree.setdefault(parent, {})
                tree[name] = leaf[...]
    return collected


def _fill(net: nnx.Module, variables: Variables) -> None:
    """Puts the variables in; a parameter that the net lacks, such as a gate, is given to it."""
    rest = {
        tuple(entry.key for entry in path): leaf
        for name in COLLECTIONS
        for path, leaf in jax.tree_util.tree_leaves_with_path({name: variables.get(name, {})})
    }
    for path, leaf in _leaves(net):
        for collection, kind in COLLECTIONS.items():
            if isinstance(leaf, kind):
                if (collection, *path) not in rest:
                    raise ValueError(
                        f"the variables lack {'/'.join((collection, *path))} of "
                        f"{type(net).__name__}: make them with init of the same model"
                    )
                set_value(leaf, rest.pop((collection, *path)))
    modules = {tuple(map(str, path)): node for path, node in nnx.iter_graph(net)}
    for (collection, *inner, name), value in rest.items():
        if not isinstance(modules.get(tuple(inner)), nnx.Module) or collection != "params":
            raise ValueError(
                f"{type(net).__name__} has no {'/'.join((collection, *inner, name))}: make the "
                "variables with init of the same model"
            )
        setattr(modules[tuple(inner)], name, nnx.Param(value))


def _reseed(net: nnx.Module, key: jax.Array) -> None:
    """A key of its own for every random stream, counted from 0."""
    for path, stream in list(nnx.iter_graph(net)):
        if isinstance(stream, nnx.RngStream):
            own = jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))
            shape = stream.key[...].shape
            set_value(stream.key, jax.random.split(own, shape) if shape else own)
            set_value(stream.count, jnp.zeros(shape, jnp.uint32))
