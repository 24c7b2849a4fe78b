"""Checks a round's inputs before its program runs, and marks invalid samples inside it."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_bn.aggregation import ServerUpdate, Weighing
from fedjax_bn.engine.batches import REQUIRED, Batches
from fedjax_bn.engine.inputs import check_image_dtype, class_labels, known_labels
from fedjax_bn.engine.mapping import check_strategy
from fedjax_bn.engine.privacy import Privacy
from fedjax_bn.sharing import Variables, everything, join

PyTree = Any
# classes(variables, batches) -> C or None, of one client's, from shapes alone
Classes = Callable[[Variables, Batches], int | None]


class Admission:
    """Checks the labels of batches against the number of classes, found once for each form.

    Args:
      classes: the number of classes of a model's outputs; None if labels are not classes.
    """

    # The one object with a state here: without it every round would trace the model anew.
    def __init__(self, classes: Classes | None):
        self._classes = classes
        self._found: dict[tuple, int | None] = {}

    def number(self, shared: PyTree, personal: PyTree, batches: Batches) -> tuple[int | None, bool]:
        """Returns C, or None for no classes, and whether it was found before.

        Args:
          shared: the shared leaves.
          personal: the personal leaves, of all clients or of one.
          batches: of all clients or of one, likewise.
        """
        read = batches["image"], batches.get("source")
        form = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(read))
        if self._classes is None:
            return None, True
        if known := form in self._found:
            return self._found[form], known
        rows = np.ndim(batches["valid"]) - 2  # 1 for the axis of the clients
        variables = join(_shapes(shared), _shapes(personal, rows))
        one = {name: _shapes(batches[name], rows) for name in _READ if name in batches}
        self._found[form] = self._classes(variables, one)
        return self._found[form], known

    def check(self, shared: PyTree, personal: PyTree, batches: Batches) -> None:
        """Raises ValueError for an image dtype or a label that a model cannot be trained on.

        It reads labels on the host. It reads labels on a device only if they are ready, or if a
        program has to be compiled anyway.
        """
        for name in set(REQUIRED) & set(batches):
            for leaf in jax.tree.leaves(batches[name]):
                if not hasattr(leaf, "dtype"):
                    raise ValueError(
                        f"batches['{name}'] holds a {type(leaf).__name__} in place of an array: "
                        "make an array of it, such as by numpy.asarray"
                    )
        given: list[Any] = [batches.get(name) for name in REQUIRED]
        image, label, valid = given
        if hasattr(valid, "dtype") and valid.dtype != bool:
            raise ValueError(
                f"batches['valid'] is {valid.dtype}; it must be bool, True for each sample that "
                "counts: convert it with astype(bool)"
            )
        if isinstance(image, np.ndarray) and not np.issubdtype(image.dtype, np.number):
            check_image_dtype(image.dtype, "batches['image']")
        if not (hasattr(image, "dtype") and hasattr(label, "dtype") and hasattr(valid, "dtype")):
            return
        if label.shape[: valid.ndim] != valid.shape:
            return  # `batches.check_batches` refuses it
        classes, known = self.number(shared, personal, batches)
        if classes is None or not (_readable(label, known) and _readable(valid, known)):
            return
        label, valid = np.asarray(label), np.asarray(valid, bool)
        whole = label.dtype.kind in "iu" and label.shape == valid.shape and label.size
        if not whole or label.min() < 0 or label.max() >= classes:
            class_labels(label, "batches['label']", classes, valid=valid)

    def admitted(self, shared: PyTree, personal: PyTree, batches: Batches) -> Batches:
        """Returns the batches; a sample with a label outside the classes is made invalid."""
        classes, _ = self.number(shared, personal, batches)
        if classes is None:
            return batches
        label, valid = batches["label"], batches["valid"]
        if not hasattr(label, "shape"):
            raise ValueError(
                "batches['label'] is a tree of arrays, but the method's task is classification: "
                "give the method a task for such labels, or batches with one class a sample"
            )
        label, known = known_labels(label, classes, "batches['label']", valid.shape)
        return batches | {"label": label, "valid": valid & known}


_READ = (*REQUIRED, "source")


def _shapes(tree: PyTree, axes: int = 0) -> PyTree:
    """Returns the shapes of arrays without their first axes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), tree)


def _readable(array: Any, known: bool) -> bool:
    """Returns whether an array can be read on the host without delaying a round."""
    if isinstance(array, np.ndarray):
        return True
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return False
    ready = array.is_ready()  # type: ignore[attr-defined]
    return array.is_fully_addressable and (not known or ready)


def check_state(state: Any) -> None:
    """Raises ValueError for a state whose arrays were donated to an earlier round."""
    count = state.round
    gone = isinstance(count, jax.Array) and not isinstance(count, jax.core.Tracer)
    if gone and count.is_deleted():
        raise ValueError(
            "this state was given to an earlier round, which used up its arrays: go on with the "
            "state that the round returned, as in `state, metrics = method.round(state, ...)`"
        )


def check_choices(
    *,
    share: Any = everything,
    weigh: Any = None,
    server: Any = None,
    privacy: Any = None,
    clients: str = "auto",
    load: Any = None,
    **others: Any,
) -> None:
    """Raises ValueError for an option of a wrong type, such as a name in place of a function.

    Args:
      share, weigh, server, privacy, clients: as in `federation.federate`.
      load: as in `client.train_locally`.
      **others: options that are not checked here.
    """
    del others
    check_strategy(clients, 2**31)  # how many clients there are is known at `init`
    weighs = weigh is None or isinstance(weigh, Weighing) or callable(weigh)
    serves = server is None or isinstance(server, ServerUpdate)
    hides = privacy is None or isinstance(privacy, Privacy)
    wrong = {
        f"share={share!r} is no sharing rule: give a function variables -> booleans, such as "
        "everything, nothing or all_but_batch_norm of fedjax_bn.sharing": not callable(share),
        f"weigh={weigh!r} is no weighing rule: give a function (sizes, risks) -> weights, such as "
        "by_size or uniform of fedjax_bn.aggregation": not weighs,
        f"server={server!r} is no server's step: give a ServerUpdate, such as averaging() of "
        "fedjax_bn.aggregation": not serves,
        f"privacy={privacy!r} is no mechanism: give engine.privacy.gaussian(clip, noise)": (
            not hides
        ),
        f"load={load!r} is no function: give load(source, batch, key) -> batch, such as "
        "fedjax_bn.client.augmenting(augment)": load is not None and not callable(load),
    }
    for sentence, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(sentence)
