"""Places inside any model, named by modules, and how many channels they have.

Methods that look at several depths of a network name them in this way; the sizes are read from
parameters, since a method's `init` gets no images.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from fedjax_bn.normalization.calls import Call, intercepting
from fedjax_bn.sharing import STATISTICS, Variables, path_names

# Where the first stages of a residual and of a densely connected network end.
_STAGES = (
    ("layer1", "layer2", "layer3"),
    ("transition1/conv", "transition2/conv", "transition3/conv"),
)
# change(name, output f[B, ..., C]) -> output
Change = Callable[[str, jax.Array], jax.Array]


def stages_of(
    method: str,
    variables: Variables,
    names: str = "",
    ends: Sequence[tuple[str, ...]] = _STAGES,
) -> dict[str, int]:
    """Returns path -> channels of the modules that `names` means, without computing anything.

    Args:
      method: whose, for a message.
      variables: a model's collections; only shapes count.
      names: modules such as "norm1,norm2"; "layer1" is the last module with that name, or with one
        that begins with "layer1_". "" for the first of `ends` that the model has, or, if it has
        none of them, all batch norms.
      ends: modules, by default the ends of the stages layer1, layer2 and layer3 of a residual
        network, and the convolutions of a DenseNet's transitions.

    Raises:
      ValueError: there is no such module, or no batch norm to choose.
    """
    norms = _channels(variables.get(STATISTICS, {}), ("mean",))
    layers = _channels(variables["params"], ("kernel", "scale", "bias"))
    inside: dict[str, int] = {}  # a block has the channels of its widest batch norm
    for path, size in norms.items():
        parts = path.split("/")
        for depth in range(1, len(parts)):
            block = "/".join(parts[:depth])
            inside[block] = max(size, inside.get(block, 0))
    known = inside | layers | norms

    def last(name: str) -> str | None:
        parts = (path for path in known if path.startswith(f"{name}_"))
        alike = [path for path in parts if "/" not in path[len(name) :]] + [name] * (name in known)
        return max(alike, key=lambda path: (len(path), path), default=None)

    wanted = [[name.strip() for name in names.split(",")]] if names else ends
    found = [[last(name) for name in stages] for stages in wanted]
    places = next((paths for paths in found if None not in paths), None if names else list(norms))
    if places == []:
        raise ValueError(
            f"{method} reads the outputs of batch norms, but the model has no batch norm: name "
            f"modules by {method}.names, of {', '.join(known)}"
        )
    if places is None:
        raise ValueError(
            f"{method}: names={names!r} finds no modules: name some of {', '.join(known)}"
        )
    return {place: known[place] for place in places if place is not None}


def changing_outputs(places: Collection[str], change: Change) -> AbstractContextManager:
    """Returns a context in which `change(name, output)` replaces outputs of traced modules.

    Args:
      places: paths of modules, such as "layer1_1".
      change: name and output f[B, ..., C] -> output.
    """

    def changed(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        output, name = function(*args, **kwargs), "/".join(call.path)
        return change(name, output) if call.method == "__call__" and name in places else output

    return intercepting(changed)


def _channels(collection: Variables, leaves: tuple[str, ...]) -> dict[str, int]:
    """Returns path -> last axis of the modules that own one of some leaves."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(collection):
        *module, name = path_names(path)
        if name in leaves:
            found["/".join(module)] = leaf.shape[-1]
    return found
