"""A model with the preprocessing that it was trained with, as one client uses it."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.adaptation import Adaptation
from fedjax_bn.adaptation.choice import Choice, choose_adaptation
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.inputs import as_images
from fedjax_bn.sharing import Variables

PyTree = Any


class Predictor(NamedTuple):
    """A received model as one client uses it; called with all its images, or with a stream.

    Attributes:
      start: `start() -> carry`, before the client's first batch.
      step: `step(carry, images [B, ...], valid bool[B]) -> (probabilities f[B, C], carry)`.
      check: raises ValueError for images [N, ...] of another form than the model was trained on.
      batch_size: B.
      order: seed of the random order in which a call passes its images; -1 keeps theirs, see
        `adaptation.choice.choose_adaptation`.
    """

    start: Callable[[], PyTree]
    step: Callable[[PyTree, np.ndarray, np.ndarray], tuple[jax.Array, PyTree]]
    check: Callable[[np.ndarray], None]
    batch_size: int
    order: int

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Returns probabilities f[N, C] of a client's images [N, ...], bytes if trained on bytes.

        An adaptation sees them in batches, in the random order of `order`, as in `evaluate`.

        Raises:
          ValueError: there are no images, or the model was trained on others.
        """
        images = np.asarray(images)
        return self.predict(len(images), images.__getitem__)

    def predict(self, count: int, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Returns the same for images that are read when their turn comes.

        Args:
          count: N.
          read: `read(index i64[b]) -> images [b, ...]`.
        """
        if not count:
            raise ValueError("there are no images to predict: give at least one")
        order = np.arange(count)
        if self.order >= 0:
            order = np.random.default_rng(self.order).permutation(count)
        blocks = np.split(order, range(self.batch_size, count, self.batch_size))
        found = np.concatenate(list(self.stream(map(read, blocks))))
        return found[np.argsort(order)]  # in the order of the images again

    def stream(self, batches: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields probabilities f[b, C] of each batch [b, ...] of one client, b from 1 to B.

        Raises:
          ValueError: as `__call__`, or a batch has more than B images.
        """
        carry = self.start()
        for images in map(as_images, batches):
            self.check(images)
            count = len(images)
            if not 1 <= count <= self.batch_size:
                raise ValueError(
                    f"a batch holds {count} images, but must hold 1 to batch_size="
                    f"{self.batch_size}: make it smaller, or the predictor with another batch_size"
                )
            # One shape for all batches, so that one program serves them.
            filled = np.pad(images, [(0, self.batch_size - count)] + [(0, 0)] * (images.ndim - 1))
            found, carry = self.step(carry, filled, np.arange(self.batch_size) < count)
            yield np.asarray(found)[:count]


def predictor(
    method: Any, variables: Variables, adapt: str = "running", batch_size: int = 32
) -> Predictor:
    """Returns a predictor with the variables of a method and the preprocessing of its training.

    Args:
      method: a `FederatedMethod` of `fedjax_bn.methods`, with which the variables were trained.
      variables: one model's, as `global_variables(state)`, or a client's own,
        `client_variables(state, k)`.
      adapt: how it predicts, see `adaptation.choice.choose_adaptation`, such as "tsmobn".
      batch_size: B, of the batches that an adaptation sees, unless `adapt` sets another.

    Raises:
      ValueError: `adapt` is unknown or does not suit, the method has no model, or the variables
        are of all clients.
    """
    if method.learned is None:
        raise ValueError(
            "this method does not say what it has learned: make it by a function of "
            "fedjax_bn.methods, or by `method_of` with what `methods.learning.learning` returns"
        )

    def check(images: np.ndarray) -> None:
        if images.ndim != 4 or images.dtype == np.uint8 or not images.size:
            return
        if images.max() > 1 and (images == np.round(images)).all():
            raise ValueError(
                f"images are {images.dtype} with the numbers of bytes, which would not be "
                "standardized as in training: give them as uint8"
            )

    choice = choose_adaptation(adapt, method.learned.model, batch_size)
    return from_choice(choice, variables, method.learned.prepare, check)


def from_choice(
    choice: Choice, variables: Variables, prepare: Prepare, check: Callable[[np.ndarray], None]
) -> Predictor:
    """Returns a predictor by an adaptation; arguments as of `Predictor` and `step_of`."""
    step, start = jax.jit(step_of(choice.adaptation, prepare)), choice.adaptation.init
    of_model = partial(start, variables), partial(step, variables)
    return Predictor(*of_model, check, choice.batch_size, choice.order)


def step_of(adaptation: Adaptation, prepare: Prepare) -> Callable[..., tuple[jax.Array, PyTree]]:
    """Returns `step(variables, carry, images, valid) -> (probabilities f[B, C], carry)`.

    It raises ValueError where the model's outputs are not logits f[B, C]. `prepare` makes what the
    model reads of stored images.
    """

    def step(
        variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        images = prepare(jnp.asarray(images), parameter_dtype(variables))
        outputs, carry = adaptation.predict(variables, carry, images, valid)
        if getattr(outputs, "ndim", 0) != 2:
            raise ValueError(
                "the model's outputs are not logits f[B, classes], which probabilities are made "
                "of: pass batches through adaptation.predict itself"
            )
        return jax.nn.softmax(outputs), carry

    return step
