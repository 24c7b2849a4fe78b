"""Wraps a user's nnx model, so that it has linen's functions `init` and `apply`.

    model = from_nnx(Net(rngs=nnx.Rngs(0)))
    variables = model.init(key, images)
    method = fedbn(model, optax.sgd(0.1))
    ...
    net = to_nnx(model, global_variables(state))   # a Net with the trained weights

nnx cannot intercept calls. So each pass copies the net and gives every module of the copy a derived
class, whose `__call__` goes through the handlers of `normalization.calls`. The user's net does not
change.
"""

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_bn.models.classifier import Wrapped
from fedjax_bn.models.hooks import predicting
from fedjax_bn.normalization.batch_norm import flax_batch_norm
from fedjax_bn.normalization.calls import Call, mode_arguments, through_handlers
from fedjax_bn.normalization.layer import RECORDED, Layer, StatisticsRule
from fedjax_bn.sharing import STATISTICS, Variables

_COLLECTIONS: dict[str, type[nnx.Variable]] = {"params": nnx.Param, STATISTICS: nnx.BatchStat}
_PASS = "fedjax_bn_pass"  # attribute of a module in a pass: (path, moving, recording)
_RNGS = "fedjax_bn_rngs"  # attribute of the net in a pass: streams for a net that takes `rngs=`


class _Recorded(nnx.Variable):
    """A value that a rule recorded in a batch norm."""


@dataclass(frozen=True)
class _NnxModel:
    """An nnx model with the functions `init` and `apply` of a linen one; made by `from_nnx`.

    The variables are nested dicts, as in linen: `params` holds every `nnx.Param` and `batch_stats`
    every `nnx.BatchStat` by its path. All other state, such as constants, stays in `net`.
    """

    net: nnx.Module  # the user's model, which never changes

    def init(self, key: jax.Array, images: jax.Array, **options: Any) -> Variables:
        """Returns the variables of `net`, whatever the arguments, which linen needs."""
        del key, images, options
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
        """Passes images f[B, ...] through a copy of `net` with these variables, as linen's `apply`.

        `train` sets the mode of `net.train()` or `net.eval()`, and is passed to a call that has one
        of the arguments of `normalization.calls.mode_arguments`; `mutable` may name "batch_stats"
        and "recorded". Every stream of `net` gets its own key from `rngs["dropout"]`, or else
        starts from its state at `from_nnx`; a call with an argument `rngs` gets streams of this key
        or 0. `method(net, images)` is called instead of `net(images)`.
        """
        net = _copied(self.net)
        _fill(net, variables)
        if rngs:
            _reseed(net, rngs["dropout"])
        # Streams of the call, not of the net, which `_reseed` does not reach.
        if "rngs" in inspect.signature(net).parameters:
            setattr(net, _RNGS, nnx.Rngs(rngs["dropout"] if rngs else 0))
        modes = net.train if train else net.eval
        modes()
        # A list, because the loop changes the modules that it visits.
        for path, module in list(nnx.iter_graph(net)):
            if isinstance(module, nnx.Module) and callable(module):
                call = tuple(map(str, path)), STATISTICS in mutable, RECORDED in mutable
                setattr(module, _PASS, call)
                # Past nnx's own `__setattr__`, which checks what it stores.
                object.__setattr__(module, "__class__", _through_handlers(type(module)))
        options = mode_arguments(method or net.__call__, train)
        output = method(net, images, **options) if method else net(images, **options)
        if not mutable:
            return output
        kinds = _COLLECTIONS | {RECORDED: _Recorded}
        return output, _collect(net, {name: kinds[name] for name in mutable})

    def __call__(self, images: jax.Array, train: bool = False) -> Any:
        """Computes images -> outputs with the weights of `net`; `apply` takes other weights."""
        return self.apply(self.init(jax.random.key(0), images), images, train=train)

    def __getattr__(self, name: str) -> Any:
        """Returns the attribute `features`, `classify` or `classifier_path` of `net`."""
        # What `models.classifier` looks for; other functions of the net would run outside a pass.
        if name in ("features", "classify", "classifier_path"):
            return getattr(self.net, name)
        return object.__getattribute__(self, name)


def from_nnx(net: nnx.Module) -> _NnxModel:
    """Wraps an nnx module, images f[B, ...] -> outputs, for every method, rule and adaptation.

    Statistics rules reach every `nnx.BatchNorm` in it. These layers keep flax's conventions:
    momentum 0.99 by default, and the biased variance as running variance. The weights are copied.
    Raises ValueError for other objects, such as a class.
    """
    if not isinstance(net, nnx.Module):
        raise ValueError(f"from_nnx takes a module such as Net(rngs=nnx.Rngs(0)), not {net!r:.80}")
    # A copy, so that training the net elsewhere does not change this model.
    return _NnxModel(_copied(net))


def to_nnx(model: Any, variables: Variables) -> nnx.Module:
    """Returns a copy of an nnx module with these parameters and batch statistics, in `eval` mode.

    Args:
      model: what `from_nnx` returned, or the nnx module itself.
      variables: of one model, such as `global_variables(state)` or `client_variables(state, 0)`.

    Raises:
      ValueError: the variables are not the model's own: a leaf is missing or has another shape, or
        a method has added some that the module does not read, such as masks or gates.
    """
    while isinstance(model, Wrapped):
        model = model.network
    if not isinstance(model, _NnxModel):
        model = from_nnx(model)
    net, variables = _copied(model.net), predicting(variables)
    module_shapes, shapes = (
        {path: jnp.shape(leaf) for path, leaf in flatten_dict(tree, sep="/").items()}
        for tree in (_collect(net, _COLLECTIONS), variables)
    )
    if differing := sorted(path for path, _ in module_shapes.items() ^ shapes.items()):
        path = differing[0]
        raise ValueError(
            f"{path} is {module_shapes.get(path, 'missing')} in {type(net).__name__} and "
            f"{shapes.get(path, 'missing')} in the variables: give those of one model alone"
        )
    _fill(net, variables)
    net.eval()
    return net


@cache
def _through_handlers(kind: type[nnx.Module]) -> type[nnx.Module]:
    """A derived class whose calls go through the handlers; cached, because JAX caches by class."""

    @wraps(kind.__call__)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        path, _, _ = getattr(self, _PASS)
        # Only the net has the attribute: its modules get streams from its own code.
        if hasattr(self, _RNGS):
            kwargs = {"rngs": getattr(self, _RNGS)} | kwargs
        kernel = self.kernel[...] if isinstance(self, nnx.Linear) else None
        # A derived class with its own `__call__` is left alone: a rule would bypass that code.
        calls_flax = kind.__call__ is nnx.BatchNorm.__call__
        normalize = partial(_normalize, cast(nnx.BatchNorm, self)) if calls_flax else None
        call = Call(path, "__call__", kernel, normalize, self)
        return through_handlers(partial(kind.__call__, self), call)(*args, **kwargs)

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
    """Normalizes by a statistics rule; stores moved and recorded values if the pass wants them."""
    # The rule replaces the layer's own computation.
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
    y, statistics = flax_batch_norm(module, layer, args, kwargs, rule, valid, (scale, bias))
    if statistics.moved is not None and moving:
        _set_value(module.mean, statistics.moved[0])
        _set_value(module.var, statistics.moved[1])
    if recording:
        for name, value in (statistics.recorded or {}).items():
            setattr(module, name, _Recorded(value))
    return y


def _set_value(variable: nnx.Variable, value: jax.Array) -> None:
    """Replaces a variable's array, of any dtype; flax 0.11 has no `Variable.set_value`."""
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value


def _copied(net: nnx.Module) -> nnx.Module:
    graph, state = nnx.split(net)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))  # new variables, same arrays


def _leaves(
    net: nnx.Module, kinds: dict[str, type[nnx.Variable]]
) -> dict[tuple[str, ...], nnx.Variable]:
    """(collection, *path) -> variable, of each kind."""
    return {
        (collection, *map(str, path)): node
        for path, node in nnx.iter_graph(net)
        for collection, kind in kinds.items()
        if isinstance(node, kind)
    }


def _collect(net: nnx.Module, kinds: dict[str, type[nnx.Variable]]) -> Variables:
    return unflatten_dict({path: leaf[...] for path, leaf in _leaves(net, kinds).items()})


def _fill(net: nnx.Module, variables: Variables) -> None:
    """Writes the variables to the net, and adds parameters that it lacks, such as gates."""
    values = flatten_dict({name: variables.get(name, {}) for name in _COLLECTIONS})
    leaves = _leaves(net, _COLLECTIONS)
    modules = {tuple(map(str, path)): node for path, node in nnx.iter_graph(net)}
    added = [path for path in values if path not in leaves]
    # A method adds parameters beside those of a module, as a gate beside a scale.
    owners = {path: modules.get(path[1:-1]) for path in added if path[0] == "params"}
    strange = [path for path in added if not isinstance(owners.get(path), nnx.Module)]
    lacking = [path for path in leaves if path not in values]
    if lacking or strange:
        problem = "the variables lack" if lacking else f"{type(net).__name__} has no"
        leaf_name = "/".join((lacking or strange)[0])
        raise ValueError(f"{problem} {leaf_name}: make the variables with init of the same model")
    for path, leaf in leaves.items():
        _set_value(leaf, values[path])
    for path, module in owners.items():
        setattr(module, path[-1], nnx.Param(values[path]))


def _reseed(net: nnx.Module, key: jax.Array) -> None:
    """Derives a key for every random stream from its path, and resets its counter to 0."""
    for path, stream in list(nnx.iter_graph(net)):
        if isinstance(stream, nnx.RngStream):
            stream_key = jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))
            # A vectorized stream has one key for each of its copies.
            shape = stream.key[...].shape
            _set_value(stream.key, jax.random.split(stream_key, shape) if shape else stream_key)
            _set_value(stream.count, jnp.zeros(shape, jnp.uint32))
