"""A user's own nnx model in the form in which the library passes batches: init and apply.

model = from_nnx(Net(rngs=nnx.Rngs(0)))
variables = model.init(key, images)
method = fedbn(model, optax.sgd(0.1))

nnx has no interceptors. Each pass makes a fresh copy of the net, whose modules get a class derived
from their own, in which `__call__` goes through the handlers of `normalization.calls`. The user's
net does not change.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_bn.normalization.calls import Call, flax_batch_norm, takes_train, through_handlers
from fedjax_bn.normalization.layer import RECORDED, Layer, StatisticsRule
from fedjax_bn.sharing import STATISTICS, Variables

_COLLECTIONS: dict[str, type[nnx.Variable]] = {"params": nnx.Param, STATISTICS: nnx.BatchStat}
_PASS = "fedjax_bn_pass"  # attribute of a module in a pass: (path, moving, recording)


class _Recorded(nnx.Variable):
    """What a rule recorded in a batch norm."""


@dataclass(frozen=True)
class NnxModel:
    """An nnx model with the functions `init` and `apply` of a linen one; made by `from_nnx`.

    Its variables are those of a linen model: `params` holds every `nnx.Param` and `batch_stats`
    every `nnx.BatchStat` by its path, dicts in dicts. All else, such as constants, stays as it is
    in `net`. A method `features` or `classify` of `net` is one of the model.

    Attributes:
      net: the model, which never changes.
    """

    net: nnx.Module

    def init(self, key: jax.Array, images: jax.Array) -> Variables:
        """Returns the variables of `net` as they are; linen's key and images do not count."""
        del key, images
        return _collect(self.net, _COLLECTIONS)

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
          variables: collections as from `init`; others are ignored.
          images: f[B, ...].
          train: whether the copy is in the mode of `net.train()` or of `net.eval()`; also an
            argument of the call, if it has one of this name.
          mutable: the collections wanted back, of `batch_stats` and `recorded`.
          rngs: random keys; every stream of `net` gets one of its own from `rngs["dropout"]`.
            Without, streams are as they were when the model was made.
          method: `method(net, images)` instead of `net(images)`.

        Returns:
          The output, and if `mutable` names collections a pair of it and these.

        Raises:
          ValueError: the variables are not those of this model.
        """
        net = nnx.merge(*_split(self.net))
        _fill(net, variables)
        if rngs:
            _reseed(net, rngs["dropout"])
        modes = net.train if train else net.eval
        modes()
        for path, module in list(nnx.iter_graph(net)):
            if isinstance(module, nnx.Module) and callable(module):
                call = tuple(map(str, path)), STATISTICS in mutable, RECORDED in mutable
                setattr(module, _PASS, call)
                object.__setattr__(module, "__class__", _through_handlers(type(module)))
        options = takes_train(method or net.__call__, train)
        output = method(net, images, **options) if method else net(images, **options)
        if not mutable:
            return output
        kinds = _COLLECTIONS | {RECORDED: _Recorded}
        return output, _collect(net, {name: kinds[name] for name in mutable})

    def __call__(self, images: jax.Array, train: bool = False) -> Any:
        """Computes images -> outputs by the model as made; `apply` is for other variables."""
        return self.apply(self.init(jax.random.key(0), images), images, train=train)

    def __getattr__(self, name: str) -> Any:
        """Returns `features`, `classify` or `classifier_path` of a net that has it."""
        if name in ("features", "classify", "classifier_path"):
            return getattr(self.net, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def from_nnx(net: nnx.Module) -> NnxModel:
    """Makes a model of an nnx module, for every method, sharing rule and adaptation.

    Statistics rules reach its `nnx.BatchNorm`, which keep flax's conventions: momentum 0.99 by
    default and the biased variance as running variance (see `normalization.calls`).

    Args:
      net: images f[B, ...] -> outputs, with its weights; it is copied.

    Raises:
      ValueError: it is not an nnx module, or one of its modules has running statistics and no
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


@cache
def _through_handlers(kind: type[nnx.Module]) -> type[nnx.Module]:
    """A class of modules whose calls go through the handlers; one a class, as JAX caches by it."""

    @wraps(kind.__call__)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        path, _, _ = getattr(self, _PASS)
        kernel = self.kernel[...] if isinstance(self, nnx.Linear) else None
        # Not in a derived class with a call of its own: a rule would replace what it does.
        ours = kind.__call__ is nnx.BatchNorm.__call__
        normalize = partial(_normalize, cast(nnx.BatchNorm, self)) if ours else None
        function = partial(kind.__call__, self)
        return through_handlers(function, Call(path, "__call__", kernel, normalize), args, kwargs)

    namespace = {"__call__": call, "__module__": kind.__module__}
    return cast(Any, type(kind))(kind.__name__, (kind,), namespace)


def _normalize(
    module: nnx.BatchNorm,
    function: Callable,
    args: tuple,
    kwargs: dict,
    rule: StatisticsRule | None,
    valid: jax.Array | None,
) -> jax.Array:
    """The output of a batch norm by a statistics rule; stores what the pass may and wants to."""
    del function
    path, moving, recording = getattr(module, _PASS)
    scale, bias, gate = (
        None if leaf is None else leaf[...]
        for leaf in (module.scale, module.bias, getattr(module, "gate", None))
    )
    layer = Layer(
        path=path,
        mean=module.mean[...],
        var=module.var[...],
        epsilon=module.epsilon,
        momentum=module.momentum,
        training=moving,
        unbiased=False,
        gate=gate,
    )
    y, given = flax_batch_norm(module, layer, args, kwargs, rule, valid, (scale, bias))
    if given.moved is not None and moving:
        _set_value(module.mean, given.moved[0])
        _set_value(module.var, given.moved[1])
    if recording:
        for name, value in (given.recorded or {}).items():
            setattr(module, name, _Recorded(value))
    return y


def _set_value(variable: nnx.Variable, value: jax.Array) -> None:
    """Gives a variable another array, of any dtype; flax 0.11 has no `Variable.set_value`."""
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value


def _split(net: nnx.Module) -> tuple[Any, Any]:
    graph, state = nnx.split(net)
    return graph, jax.tree.map(lambda leaf: leaf, state)  # variables of its own


def _leaves(net: nnx.Module) -> Iterator[tuple[tuple[str, ...], nnx.Variable]]:
    for path, node in list(nnx.iter_graph(net)):
        if isinstance(node, nnx.Variable):
            yield tuple(map(str, path)), node


def _collect(net: nnx.Module, kinds: dict[str, type[nnx.Variable]]) -> Variables:
    """The variables of each kind as dicts in dicts; kinds without any have no collection."""
    found = {
        (collection, *path): leaf[...]
        for path, leaf in _leaves(net)
        for collection, kind in kinds.items()
        if isinstance(leaf, kind)
    }
    return unflatten_dict(found)


def _fill(net: nnx.Module, variables: Variables) -> None:
    """Puts the variables in; a parameter that the net lacks, such as a gate, is given to it."""
    rest = flatten_dict({name: variables.get(name, {}) for name in _COLLECTIONS})
    for path, leaf in _leaves(net):
        for collection, kind in _COLLECTIONS.items():
            if isinstance(leaf, kind):
                if (collection, *path) not in rest:
                    raise ValueError(
                        f"the variables lack {'/'.join((collection, *path))} of "
                        f"{type(net).__name__}: make them with init of the same model"
                    )
                _set_value(leaf, rest.pop((collection, *path)))
    modules = {tuple(map(str, path)): node for path, node in nnx.iter_graph(net)}
    for (collection, *inner, name), value in rest.items():
        if not isinstance(modules.get(tuple(inner)), nnx.Module) or collection != "params":
            raise ValueError(
                f"{type(net).__name__} has no {'/'.join((collection, *inner, name))}: make the "
                "variables with init of the same model"
            )
        setattr(modules[tuple(inner)], name, nnx.Param(value))


def _reseed(net: nnx.Module, key: jax.Array) -> None:
    """Gives every random stream a key of its own, counted from 0."""
    for path, stream in list(nnx.iter_graph(net)):
        if isinstance(stream, nnx.RngStream):
            own = jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))
            shape = stream.key[...].shape
            _set_value(stream.key, jax.random.split(own, shape) if shape else own)
            _set_value(stream.count, jnp.zeros(shape, jnp.uint32))
