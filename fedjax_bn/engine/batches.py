"""Defines a round's batches and what `valid` implies, and checks a round's arguments.

    {"image": f|u8[C, S, B, ...] (or i32[C, S, B], numbers of samples in "source"),
     "label": classes [C, S, B], whole numbers of any dtype, or a tree of arrays [C, S, B, ...],
     "valid": bool[C, S, B],
     "source": a tree of arrays [C, N, ...], in which `load` finds samples (optional),
     "participates": bool[C] (optional; all True),
     "size": i32[C], samples that a client owns (optional; the valid samples of its largest epoch),
     "validation": a tree of arrays [C, ...], each client's validation samples (optional),
     "client": i32[C], the client of each row, and "population": i32[], the number of all clients
         (optional; the rows are all clients, in order)}

S steps are E equal local epochs. On a mesh of devices padding rows, which count nowhere, may follow
up to a multiple of its clients axis. For images and labels see `fedjax_bn.engine.inputs`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.engine.inputs import class_labels, known_labels
from fedjax_bn.sharing import Variables, filled, join, without

PyTree = Any
Batches = dict[str, PyTree]
# classes(variables, batches of one client) -> C or None, from shapes alone
Classes = Callable[[Variables, Batches], int | None]

REQUIRED = ("image", "label", "valid")
_OPTIONAL = ("source", "participates", "size", "validation", "client", "population")
_BY_CLIENT = ("participates", "size", "client")


def check_batches(batches: Batches, rows: int, epochs: int) -> None:
    """Raises ValueError if batches of C rows and E epochs lack a key or have a wrong shape."""
    needed = {*REQUIRED, *["population"] * ("client" in batches)}
    missing, unknown = needed - set(batches), set(batches) - {*REQUIRED, *_OPTIONAL}
    if missing or unknown:
        faults = f"lack {sorted(missing)} and have unknown {sorted(unknown)}"
        raise ValueError(f"batches {faults}: optional are {', '.join(_OPTIONAL)}")
    shape = jax.tree.leaves(batches["label"])[0].shape[:3]
    forms: dict[str, tuple] = {"label": (rows, *shape[1:]), "image": shape, "valid": shape}
    forms |= dict.fromkeys((*_BY_CLIENT, "source", "validation"), (rows,))
    for name, form in forms.items():
        for leaf in jax.tree.leaves(batches.get(name, ())):
            fits = len(shape) == 3 and leaf.shape[: len(form)] == form
            fits &= leaf.ndim == 1 or name not in _BY_CLIENT
            if not fits or (name == "valid" and leaf.dtype != bool):
                array = f"batches['{name}'] is {leaf.dtype}{list(leaf.shape)}"
                begin = f"{list(form)} of [K={rows}, S, B], valid as bool"
                raise ValueError(f"{array}, but must begin with {begin}")
    if shape[1] % epochs:
        raise ValueError(f"{shape[1]} steps are not {epochs} equal epochs: pad them by valid=False")


def blank_padding(batch: Batches) -> Batches:
    """Returns the batch with zeros in image and label where `valid` bool[...] is False."""
    # A weight of 0 in the loss is not enough: in the gradient 0 times a NaN of the padding is NaN.
    valid = batch["valid"]

    def blank(leaf: jax.Array) -> jax.Array:
        mask = valid.reshape(*valid.shape, *(1,) * (leaf.ndim - valid.ndim))
        return jnp.where(mask, leaf, jnp.zeros((), leaf.dtype))

    return batch | {name: jax.tree.map(blank, batch[name]) for name in ("image", "label")}


def owned_samples(batches: Batches, epochs: int) -> jax.Array:
    """Returns "size" i32[] of a client's batches, by default the samples of its largest epoch."""
    if "size" in batches:
        return batches["size"]
    return batches["valid"].reshape(epochs, -1).sum(1, dtype=jnp.int32).max()


def first_epoch(batches: Batches, epochs: int, times: int = 1) -> Batches:
    """Returns the steps of one client's first local epoch of E, one or more times in a row."""
    count = batches["valid"].shape[0] // epochs
    steps = without(batches, "source")  # which has no axis S
    return batches | jax.tree.map(lambda leaf: jnp.concatenate([leaf[:count]] * times), steps)


class Admission:
    """Checks labels against the number of classes, which it computes once for each shape.

    `sent` has the shared leaves, `own` the personal and the frozen ones: a broadcast and an `Own`
    with one client's batches, or a state as both with those of all clients.
    """

    # A class, because it keeps the numbers: else every round would trace the model again.
    def __init__(self, classes: Classes | None):
        self._classes = classes
        self._numbers: dict[tuple, int | None] = {}

    def _number(self, sent: Any, own: Any, batches: Batches) -> tuple[int | None, bool]:
        """Returns C, or None if labels are not classes, and whether the model was traced before."""
        if self._classes is None:
            return None, True
        inputs = batches["image"], batches.get("source")
        form = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(inputs))
        is_traced = form in self._numbers
        if not is_traced:
            rows = batches["valid"].ndim - 2  # 1 for the axis of the clients
            shared = filled(sent.shared, own.frozen)
            variables = join(_shapes(shared), _shapes(own.personal, rows))
            read = {name: batches[name] for name in (*REQUIRED, "source") if name in batches}
            # Computed from shapes, which costs one trace of the model's forward pass.
            self._numbers[form] = self._classes(variables, _shapes(read, rows))
        return self._numbers[form], is_traced

    def check(self, sent: Any, own: Any, batches: Batches) -> None:
        """Raises ValueError for a label that is not a class, if labels can be read on the host."""
        arrays: list[Any] = [batches.get(name) for name in REQUIRED]
        _, label, valid = arrays
        # `check_batches` and `admitted` refuse what is left out here.
        if not all(hasattr(x, "dtype") for x in arrays) or label.shape[: valid.ndim] != valid.shape:
            return
        classes, is_traced = self._number(sent, own, batches)
        if classes is not None and _readable(label, is_traced) and _readable(valid, is_traced):
            valid = np.asarray(valid, bool)
            class_labels(np.asarray(label), "batches['label']", classes, valid=valid)

    def admitted(self, sent: Any, own: Any, batches: Batches) -> Batches:
        """Returns the batches with valid=False for samples whose label is outside the classes."""
        classes, _ = self._number(sent, own, batches)
        if classes is None:
            return batches
        label, valid = batches["label"], batches["valid"]
        label, in_range = known_labels(label, classes, "batches['label']", valid.shape)
        return batches | {"label": label, "valid": valid & in_range}


def _shapes(tree: PyTree, axes: int = 0) -> PyTree:
    """Returns the shapes of arrays without their first `axes` axes."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        # JAX warns of a NumPy array's 64 bits, which it reads as 32.
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(leaf.shape[axes:], dtype)

    return jax.tree.map(shape, tree)


def _readable(array: Any, is_traced: bool) -> bool:
    """Returns whether an array can be read on the host without delaying a round."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return isinstance(array, np.ndarray)
    # Before the first round of a shape waiting costs nothing: a program must be compiled anyway.
    ready = array.is_ready()  # type: ignore[attr-defined]
    return array.is_fully_addressable and (not is_traced or ready)
