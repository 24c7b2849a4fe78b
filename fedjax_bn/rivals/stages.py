"""Places inside any model, named by modules, and how many channels they have.

Methods that look at several depths of a network name them so; the sizes are read from parameters,
since a method's `init` sees no images.
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
    """Path -> channels of the modules that `names` means; nothing is computed.

    Args:
      method: whose, for a message.
      variables: a model's collections; only shapes count.
      names: modules such as "norm1,norm2"; of "layer1" the last whose name is that or begins with
        "layer1_". "" for the first of `ends` that the model has, or, where it has none of them,
        all batch norms.
      ends: modules, by default the ends of the stages layer1, layer2 and layer3 of a residual
        network, and the convolutions of a DenseNet's transitions.

    Raises:
      ValueError: there is no such module, or no batch norm to choose.
    """
    norms = _channels(variables.get(STATISTICS, {}), ("mean",))
    layers = _channels(variables["params"], ("kernel", "scale", "bias"))
    inside: dict[str, int] = {}  # of a block: its widest batch norm
    for path, size in norms.items():
        parts = path.split("/")
        for depth in range(1, len(parts)):
            block = "/".join(parts[:depth])
            inside[block] = max(size, inside.get(block, 0))
    known = inside | layers | norms

    def last(name: str) -> str | None:
        alike = [path for path in known if path == name or _follows(path, name)]
        return max(alike, key=lambda path: (len(path), path), default=None)

    wanted = [[name.strip() for name in names.split(",")]] if names else ends
    found = [[last(name) for name in stages] for stages in wanted]
    places = next((paths for paths in found if None not in paths), None if names else list(norms))
    if places == []:
        raise ValueError(
            f"{method} looks behind batch norms, but the model has no batch norm: name modules by "
            f"{method}.names, of {', '.join(known)}"
        )
    if places is None:
        raise ValueError(
            f"{method}: names={names!r} finds no modules: name some of {', '.join(known)}"
        )
    return {place: known[place] for place in places if place is not None}


def behind(places: Collection[str], change: Change) -> AbstractContextManager:
    """A context in which `change(name, output)` stands in place of the outputs of modules.

    It acts while they are traced.

    Args:
      places: paths of modules, such as "layer1_1".
      change: what is to be done.
    """

    def changed(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        output, name = function(*args, **kwargs), "/".join(call.path)
        return change(name, output) if call.method == "__call__" and name in places else output

    return intercepting(changed)


def _channels(collection: Variables, leaves: tuple[str, ...]) -> dict[str, int]:
    """Path -> last axis of the modules that own one of some leaves."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(collection):
        *module, name = path_names(path)
        if name in leaves:
            found["/".join(module)] = leaf.shape[-1]
    return found


def _follows(path: str, name: str) -> bool:
    return path.startswith(f"{name}_") and "/" not in path[len(name) :]
