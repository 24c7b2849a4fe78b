"""Sharing rules: which leaves of a model clients share, and which are frozen.

A rule maps a model's variables (linen collections) to a tree of booleans of the same structure:
True for a leaf that is shared and averaged, False for one that stays with its client. Rules look at
collections and modules: a module is a batch norm if and only if it has a running mean or variance
in `batch_stats`, whatever its own name. A spectral norm, which keeps a vector and a singular value
there, is not one.

Frozen leaves are a third kind. A rule of the same form chooses them: True for a leaf that nothing
trains. There is one copy of them, in `FederatedState.frozen`; the shared and the personal leaves
have None in their places, so that optimizers, memories and uploads do not contain them. Where a
model is passed through, the collection `frozen` of its variables has them: `models.forward` puts
them back into their places, and `local_step.differentiate` does so for an objective.
"""

import re
from collections.abc import Callable
from typing import Any

import jax

PyTree = Any
Variables = dict[str, PyTree]
SharingRule = Callable[[Variables], PyTree]

STATISTICS = "batch_stats"
# What a client has measured of its own data: personal, and zeros in what an unseen client receives.
MEASURED = "measured"
# The model with which a client predicts instead of the shared one: personal, likewise zeros.
OWN = "own"
# Entries of that collection with collections of the network, which lack frozen leaves too.
_OWN_MODELS = ("model", "local")
# {collection: tree}, the frozen leaves, None elsewhere; only where a rule freezes some.
FROZEN = "frozen"
# Names of leaves: `mean` and `var` of flax's and our batch norms, `running_mean` of a user's.
_MEAN_OR_VARIANCE = re.compile(r"(^|_)(mean|var|variance)$")


def everything(variables: Variables) -> PyTree:
    """Shares every leaf, running statistics included (FedAvg, McMahan et al. 2017)."""
    return jax.tree.map(lambda _: True, variables)


def nothing(variables: Variables) -> PyTree:
    """Shares no leaf: every client trains alone (SingleSet in FedBN)."""
    return jax.tree.map(lambda _: False, variables)


def all_but_batch_norm(variables: Variables) -> PyTree:
    """Keeps every batch norm and all running statistics local (FedBN, Section 4.1).

    ValueError if the model has no batch norm, so that the rule would silently share everything.
    """
    return _outside(_some(batch_norm_paths(variables)), variables)


def all_but_statistics(variables: Variables) -> PyTree:
    """Keeps running statistics local, shares scale and bias (SiloBN, Andreux et al. 2020).

    ValueError if the model has no batch norm.
    """
    _some(batch_norm_paths(variables))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: path[0].key != STATISTICS, variables)


def all_but_norms(variables: Variables) -> PyTree:
    """Keeps every norm (`norm_paths`) and running statistics local; ValueError if there is none."""
    return _outside(_some(norm_paths(variables)), variables)


def _outside(modules: frozenset[tuple[str, ...]], variables: Variables) -> PyTree:
    """Returns True for the leaves that are neither running statistics nor of some modules."""

    def shared(path: tuple, leaf: Any) -> bool:
        del leaf
        # Scale and bias have the same path in "params" as their statistics in "batch_stats".
        collection, *module, _ = path_names(path)
        return collection != STATISTICS and tuple(module) not in modules

    return jax.tree_util.tree_map_with_path(shared, variables)


def keeping(share: SharingRule, collection: str, *, shared: bool = False) -> SharingRule:
    """Returns the sharing rule with which every client keeps a whole collection.

    `share` decides for all others, and does not see this one, which variables need not have. With
    `shared` clients share the collection instead.
    """

    # Without the collection, so that it does not change what the inner rule decides for the others.
    def rule(variables: Variables) -> PyTree:
        selected = {name: tree for name, tree in variables.items() if name == collection}
        whole = (everything if shared else nothing)(selected)
        return {**share(without(variables, collection)), **whole}

    return rule


def at(*paths: str, statistics: bool = True) -> SharingRule:
    """Returns the rule that is True for the leaves of some modules, to freeze these modules.

    Paths are modules or single leaves, such as "encoder" or "encoder/block0/kernel"; at use,
    ValueError if one is not in the variables. Without `statistics` their running statistics move; a
    batch norm with frozen ones normalizes by them in training, as in FixBN.
    """
    return _by_path(paths, True, statistics)


def all_but(*paths: str, statistics: bool = True) -> SharingRule:
    """Returns the rule that is True for all leaves outside some modules; arguments are as in `at`.

    With `frozen=all_but("head")` the head alone is trained.
    """
    return _by_path(paths, False, statistics)


def _by_path(paths: tuple[str, ...], inside: bool, statistics: bool) -> SharingRule:
    module_paths = [tuple(path.split("/")) for path in paths]

    def rule(variables: Variables) -> PyTree:
        leaves = jax.tree_util.tree_leaves_with_path(variables)
        leaf_paths = [path_names(path)[1:] for path, _ in leaves]
        for path in module_paths:
            if not any(names[: len(path)] == path for names in leaf_paths):
                modules = ", ".join(sorted({names[0] for names in leaf_paths}))
                place = f"the path {'/'.join(path)!r} of frozen or names"
                raise ValueError(f"{place} is not in the model: {modules}")

        def chosen(path: tuple, leaf: Any) -> bool:
            del leaf
            collection, *names = path_names(path)
            is_inside = any(tuple(names[: len(module)]) == module for module in module_paths)
            return is_inside == inside and (statistics or collection != STATISTICS)

        return jax.tree_util.tree_map_with_path(chosen, variables)

    return rule


def split_frozen(variables: Variables, mask: PyTree) -> tuple[Variables, Variables]:
    """Returns the variables with None for frozen leaves, and {collection: frozen leaves}.

    `mask` has True for each leaf that a rule freezes. Only `params` and `batch_stats` have frozen
    leaves: collections that a method adds are trained. ValueError if all or no parameters are.
    """
    network = ("params", STATISTICS)
    mask = {name: tree if name in network else nothing(tree) for name, tree in mask.items()}
    chosen = jax.tree.leaves(mask)
    if not any(chosen) or all(jax.tree.leaves(mask["params"])):
        frozen_leaves = "every parameter" if any(chosen) else "no leaf"
        raise ValueError(f"frozen chooses {frozen_leaves}: choose a part, or leave it out")
    frozen, trained = split(variables, mask)
    if OWN in trained:
        models = {
            name: {
                collection: split(leaves, mask[collection])[1]
                for collection, leaves in tree.items()
            }
            for name, tree in trained[OWN].items()
            if name in _OWN_MODELS
        }
        trained[OWN] = {**trained[OWN], **models}
    return trained, {name: tree for name, tree in frozen.items() if jax.tree.leaves(tree)}


def filled(variables: Variables, frozen: PyTree) -> Variables:
    """Returns the variables with frozen leaves in the places of None.

    `frozen` is the second result of `split_frozen`, or () for none.
    """
    if not frozen:
        return variables
    return {
        name: join(tree, frozen[name]) if name in frozen else tree
        for name, tree in variables.items()
    }


def trainable(variables: Variables, frozen: PyTree = None) -> Variables:
    """Returns the variables with None for frozen leaves, by default for their own ones."""
    frozen = frozen or variables.get(FROZEN) or {}
    return {
        name: split_like(tree, frozen[name])[1] if name in frozen else tree
        for name, tree in variables.items()
    }


def complete(variables: Variables) -> Variables:
    """Returns a model's collections with the leaves of the collection `frozen` in their places."""
    return filled(without(variables, FROZEN), variables.get(FROZEN) or ())


def with_frozen(variables: Variables, frozen: PyTree) -> Variables:
    """Returns the variables with this collection `frozen`, if their model has frozen leaves."""
    return {**variables, FROZEN: frozen} if FROZEN in variables else variables


def without(variables: Variables, *collections: str) -> Variables:
    """Returns the variables without some collections."""
    return {name: tree for name, tree in variables.items() if name not in collections}


def batch_norm_paths(variables: Variables) -> frozenset[tuple[str, ...]]:
    """Returns the paths of modules with a running mean or variance, as ("layer1_0", "norm1")."""
    leaves = jax.tree_util.tree_leaves_with_path(variables.get(STATISTICS, {}))
    paths = [path_names(path) for path, _ in leaves]
    return frozenset(tuple(path) for *path, name in paths if _MEAN_OR_VARIANCE.search(name))


def norm_paths(variables: Variables) -> frozenset[tuple[str, ...]]:
    """Returns the paths of all batch, layer, group, instance and RMS norms, as `batch_norm_paths`.

    A norm is a batch norm, or a module whose only parameters are `scale` f[C] and
    optionally `bias` f[C], as flax's norms of linen and nnx have them.
    """
    modules: dict[tuple[str, ...], set[tuple[str, int]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables.get("params", {})):
        *module, name = path_names(path)
        modules.setdefault(tuple(module), set()).add((name, leaf.ndim))
    only = {("scale", 1), ("bias", 1)}
    # A scale is necessary; anything beside scale and bias makes it another kind of layer.
    norms = {path for path, leaves in modules.items() if ("scale", 1) in leaves <= only}
    return batch_norm_paths(variables) | norms


def path_names(path: tuple[Any, ...] | list[Any]) -> tuple[str, ...]:
    """Returns the names along a leaf's path in a tree of dicts."""
    return tuple(str(getattr(entry, "key", entry)) for entry in path)


def _some(norms: frozenset[tuple[str, ...]]) -> frozenset[tuple[str, ...]]:
    """Returns the paths of norms; raises ValueError if there are none."""
    # Without this check a model with another kind of norm would be shared as a whole.
    if not norms:
        fault = "the sharing rule keeps norms local, and the model has no batch norm"
        norm = f"mean or variance in '{STATISTICS}'; for all_but_norms no norm"
        raise ValueError(f"{fault} ({norm}): use share=everything, or add one")
    return norms


def split(variables: Variables, mask: PyTree) -> tuple[PyTree, PyTree]:
    """Splits variables into (shared, personal); each has None where the other has the leaf.

    `mask` are booleans of the same structure, as a sharing rule returns them.
    """
    shared = jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, variables)
    personal = jax.tree.map(lambda keep, leaf: None if keep else leaf, mask, variables)
    return shared, personal


def split_like(variables: Variables, shared: PyTree) -> tuple[PyTree, PyTree]:
    """Splits variables at the leaves that an earlier `split` put into `shared`."""
    # JAX treats None as an empty subtree unless `is_leaf` accepts it.
    mask = jax.tree.map(lambda leaf: leaf is not None, shared, is_leaf=lambda leaf: leaf is None)
    return split(variables, mask)


def join(shared: PyTree, personal: PyTree) -> Variables:
    """Undoes `split`."""

    def joined(leaf: Any, personal_leaf: Any) -> Any:
        return personal_leaf if leaf is None else leaf

    return jax.tree.map(joined, shared, personal, is_leaf=lambda leaf: leaf is None)


def describe(variables: Variables, mask: PyTree, modules: bool = True, frozen: PyTree = ()) -> str:
    """Returns a table of shared, personal and frozen leaves, with counts and bytes, as text.

    `variables` are of one client, arrays or `jax.ShapeDtypeStruct`s, and `mask` is True for each
    shared leaf; `frozen` are the leaves that they lack. Without `modules` it has only sums.
    """
    leaves = [leaf for tree in (variables, frozen) for leaf in jax.tree.leaves_with_path(tree)]
    kinds = ["shared" if shared else "personal" for shared in jax.tree.leaves(mask)]
    kinds += ["frozen"] * (len(leaves) - len(kinds))
    tables: dict[str, dict[tuple[str, str], list]] = {"shared": {}, "personal": {}}
    for (path, leaf), kind in zip(leaves, kinds, strict=True):
        collection, *inner, name = path_names(path)
        rows = tables.setdefault(kind, {})
        row = rows.setdefault(("/".join(inner) or ".", collection), [])
        row.append((name, leaf.size, leaf.size * leaf.dtype.itemsize))
    lines: list[str] = []
    for kind, rows in tables.items():
        _, values, sizes = _totals([entry for row in rows.values() for entry in row])
        count = sum(map(len, rows.values()))
        lines.append(f"{kind}: {count} leaves, {values:,} values, {sizes:,} bytes")
        for (module, collection), row in rows.items() if modules else ():
            names, values, sizes = _totals(row)
            cells = f"{module:<28} {collection:<12} {names:<14}"
            lines.append(f"  {cells} {values:>12,} {sizes:>14,} B")
    return "\n".join(lines)


def _totals(entries: list[tuple[str, int, int]]) -> tuple[str, int, int]:
    """Returns the names of leaves, and the sums of their values and bytes."""
    names = ", ".join(entry[0] for entry in entries)
    return names, sum(entry[1] for entry in entries), sum(entry[2] for entry in entries)
