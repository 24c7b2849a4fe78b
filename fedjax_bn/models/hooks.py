"""Hooks: how a collection that a method adds to the variables changes each pass.

A method may add a collection that the network itself does not read, such as a latent between
features and classifier. The method's module has a function `hook(tree, images, key) -> Hooked`.
`models.forward.forward` calls it in training and at test if the variables contain the collection.
"""

import importlib
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from fedjax_bn.engine.backend import where_tree
from fedjax_bn.models.features import Around
from fedjax_bn.sharing import MEASURED, OWN, Variables, join, without

PyTree = Any
# Collection -> module with its `hook`. Modules are imported at first use, because `rivals` imports
# `models`, and because variables read from a file may need a hook that is not imported yet.
_HOOKS = {
    "restitution": "fedjax_bn.contrib.snr",
    "instance_norms": "fedjax_bn.contrib.gperxan",
    "amplitude": "fedjax_bn.contrib.harmofl",
    "latent": "fedjax_bn.contrib.fedsr",
    MEASURED: "fedjax_bn.contrib.fedrdn",
}


class Hooked(NamedTuple):
    """How a hook changes a pass.

    Attributes:
      images: f[B, ...], the model's new inputs.
      around: called instead of the classifier; None to call the classifier itself.
      contexts: contexts in which the model is applied.
    """

    images: jax.Array
    around: Around | None = None
    contexts: tuple[AbstractContextManager, ...] = ()


def take(
    variables: Variables, images: jax.Array, key: jax.Array | None
) -> tuple[Variables, Hooked]:
    """Returns the variables without the collections that have hooks, and the hooks' joint changes.

    Args:
      variables: a model's collections, optionally with some of `_HOOKS`.
      images: f[B, ...], prepared as the model expects.
      key: random key of a training pass; None at test.
    """
    done = Hooked(images)
    for name, module in _HOOKS.items():
        if name in variables:
            new = importlib.import_module(module).hook(variables[name], done.images, key)
            done = Hooked(new.images, new.around or done.around, done.contexts + new.contexts)
    return without(variables, *_HOOKS), done


def predicting(variables: Variables) -> Variables:
    """Returns the collections that predict: a client's own model (`sharing.OWN`) if it has one."""
    if OWN not in variables:
        return variables
    own, rest = variables[OWN], without(variables, OWN)
    shared = {name: rest[name] for name in own["model"]}
    model = join(own["model"], shared)  # frozen leaves may be among the shared ones only
    # An unseen client has zeros, and so predicts with the shared model.
    return {**rest, **where_tree(own["present"] > 0, model, shared)}


def follow(
    variables: Variables, so_far: PyTree, images: jax.Array, valid: jax.Array | None
) -> PyTree:
    """Returns what a client has measured (`sharing.MEASURED`) after the next batch of its stream.

    Args:
      variables: as the client received them.
      so_far: the collection before the batch; that of the variables before the first one.
      images: f[B, ...], prepared as the model expects.
      valid: bool[B], the samples that count; None for all.
    """
    module = importlib.import_module(_HOOKS[MEASURED])
    return module.follow(variables[MEASURED], so_far, images, valid)
