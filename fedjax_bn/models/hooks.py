"""Hooks: how a collection that a method adds to the variables changes each pass.

A method may add a collection that the network itself does not read, such as a latent between
features and classifier. The method's module registers a function for it, which `forward` calls in
training and at test. A served model has variables and no method, and arrays cannot carry a
function: so the name of the collection stands for it. The table is written by imports alone;
whoever reads variables from a file imports `fedjax_bn.contrib` first.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from fedjax_bn.engine.backend import where_tree
from fedjax_bn.models.classifier import Around
from fedjax_bn.sharing import MEASURED, OWN, Variables, complete, join, without

PyTree = Any


class Hooked(NamedTuple):
    """How a hook changes a pass."""

    images: jax.Array  # f[B, ...], the model's new inputs
    around: Around | None = None  # called instead of the classifier
    contexts: tuple[AbstractContextManager, ...] = ()  # contexts in which the model is applied


Hook = Callable[[PyTree, jax.Array, jax.Array | None], Hooked]
# follow(received, so_far, images, valid) -> the collection after the next batch of a stream.
Follow = Callable[[PyTree, PyTree, jax.Array, jax.Array | None], PyTree]
# Collection -> its function.
_HOOKS: dict[str, Hook] = {}
_FOLLOWERS: dict[str, Follow] = {}


def register(collection: str, hook: Hook, follow: Follow | None = None) -> None:
    """Makes `forward` call a hook whenever the variables contain a collection.

    `hook(tree, images, key) -> Hooked` gets the key None at test; `follow` is for `MEASURED`.
    """
    _HOOKS[collection] = hook
    if follow:
        _FOLLOWERS[collection] = follow


def apply_hooks(
    variables: Variables, images: jax.Array, key: jax.Array | None
) -> tuple[Variables, Hooked]:
    """Returns the variables without the collections that have hooks, and the hooks' joint changes.

    The images are f[B, ...]; `key` is None at test.
    """
    hooked = Hooked(images)
    # In the order of names, so that the order of imports has no effect.
    for name in sorted(_HOOKS.keys() & variables.keys()):
        change = _HOOKS[name](variables[name], hooked.images, key)
        contexts = hooked.contexts + change.contexts
        hooked = Hooked(change.images, change.around or hooked.around, contexts)
    return without(variables, *_HOOKS), hooked


def predicting(variables: Variables) -> Variables:
    """Returns the collections that predict: a client's own model (`sharing.OWN`) if it has one."""
    if OWN not in variables:
        return variables
    personal, received = variables[OWN], without(variables, OWN)
    if "added" in personal:  # to some parameters; zeros for an unseen client
        received = complete(received)
        trees = personal["added"]["params"], received["params"]
        sum_of = lambda a, w: w if a is None else w + a  # noqa: E731
        return {**received, "params": jax.tree.map(sum_of, *trees, is_leaf=lambda a: a is None)}
    shared = {name: received[name] for name in personal["model"]}
    model = join(personal["model"], shared)  # frozen leaves may be among the shared ones only
    # An unseen client has zeros, and so predicts with the shared model.
    return {**received, **where_tree(personal["present"] > 0, model, shared)}


def follow(
    variables: Variables, so_far: PyTree, images: jax.Array, valid: jax.Array | None
) -> PyTree:
    """Returns what a client that received these variables has measured after the next batch.

    `so_far` is the collection `sharing.MEASURED` before the images f[B, ...], of which `valid`
    bool[B] count (None for all).
    """
    if MEASURED not in _FOLLOWERS:
        raise KeyError(f"no `follow` is registered for {MEASURED!r}: import its method's module")
    return _FOLLOWERS[MEASURED](variables[MEASURED], so_far, images, valid)
