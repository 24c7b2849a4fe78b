"""Predicts with a model, an adaptation, and the preprocessing of the model's training."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.adaptation import Adaptation
from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.adaptation.choice import Choice, choose_adaptation
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.images import Prepare
from fedjax_bn.engine.inputs import as_images
from fedjax_bn.engine.segmentation import as_classes
from fedjax_bn.models.hooks import predicting
from fedjax_bn.sharing import Variables

PyTree = Any


class Predictor(NamedTuple):
    """A model with its preprocessing, for one client's images: all at once, or in a stream."""

    start: Callable[[], PyTree]  # `start() -> carry`, the carry before the client's first batch
    # `step(carry, images [B, ...], valid bool[B]) -> (probabilities f[B, C], carry)`; f[B, H, W, C]
    # of pixels if the model segments
    step: Callable[[PyTree, np.ndarray, np.ndarray], tuple[jax.Array, PyTree]]
    # raises ValueError for images [N, ...] of another form than the model was trained on
    check: Callable[[np.ndarray], None]
    batch_size: int  # B
    # the seed of the random order in which a call passes its images; -1 keeps the given order, see
    # `adaptation.choice.choose_adaptation`
    order: int

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Returns probabilities f[N, C] of a client's images [N, ...], bytes if trained on bytes.

        They are f[N, H, W, C], of each pixel, if the model segments, with the background first.
        The adaptation gets the images in batches, in the order of `order`, as in `evaluate`.

        Raises ValueError if there are no images, or their form is not that of the training images.
        """
        images = np.asarray(images)
        return self.predict(len(images), images.__getitem__)

    def predict(self, count: int, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Returns the same as a call, for N images by `read(index i64[b]) -> images [b, ...]`."""
        index, batches = zip(*self.blocks(count, read), strict=True)
        # in the images' own order
        return np.concatenate(batches)[np.argsort(np.concatenate(index))]

    def blocks(
        self, count: int, read: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields index i64[b] and probabilities f[b, ...] of each batch, in the order of `order`.

        The arguments are those of `predict`, which keeps all probabilities in memory.
        """
        order = np.arange(count)
        if self.order >= 0:
            order = np.random.default_rng(self.order).permutation(count)
        index = np.split(order, range(self.batch_size, count, self.batch_size))
        return zip(index, self.stream(map(read, index)), strict=True)

    def stream(self, batches: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields probabilities f[b, ...] of each batch [b, ...] of one client, b <= B."""
        carry = self.start()
        for images in map(as_images, batches):
            self.check(images)
            count = len(images)
            # Padding gives all batches one shape, so that `step` compiles once.
            filled = np.pad(images, [(0, self.batch_size - count)] + [(0, 0)] * (images.ndim - 1))
            probabilities, carry = self.step(carry, filled, np.arange(self.batch_size) < count)
            yield np.asarray(probabilities)[:count]


def predictor(
    method: Any, variables: Variables, adapt: str | None = "running", batch_size: int = 32
) -> Predictor:
    """Returns a predictor with the variables of a method and the preprocessing of its training.

    Args:
      method: a `FederatedMethod` of `fedjax_bn.methods`, with which the variables were trained.
      variables: the variables of one model: `global_variables(state)`, or a client's own,
        `client_variables(state, k)`.
      adapt: the adaptation, such as "tsmobn", see `adaptation.choice.choose_adaptation`; None: as
        the method's own clients predict (`FederatedMethod.statistics`).
      batch_size: B, the size of the adaptation's batches, unless `adapt` sets another.

    Raises:
      ValueError: `adapt` is unknown or does not suit the model, the method has no model, or the
        variables are those of all clients.
    """
    if method.learned is None:
        raise ValueError(
            "this method does not say what it has learned: make it by a function of "
            "fedjax_bn.methods, or by `method_of` with what `methods.learning.learning` returns"
        )
    model = method.learned.model
    if adapt is None:
        choice = Choice(of_clients(model, method.statistics), batch_size, order=-1)
    else:
        choice = choose_adaptation(adapt, model, batch_size)
    # The method does not know the form of its images; `as_images` checks what holds for all.
    return from_choice(choice, variables, method.learned.prepare, lambda images: None)


def from_choice(
    choice: Choice, variables: Variables, prepare: Prepare, check: Callable[[np.ndarray], None]
) -> Predictor:
    """Returns a predictor by an adaptation; see `Predictor` and `step_of` for the arguments."""
    variables = predicting(variables)  # an adaptation moves the parameters that predict
    start = partial(choice.adaptation.init, variables)
    step = partial(jax.jit(step_of(choice.adaptation, prepare)), variables)
    return Predictor(start, step, check, choice.batch_size, choice.order)


def step_of(adaptation: Adaptation, prepare: Prepare) -> Callable[..., tuple[jax.Array, PyTree]]:
    """Returns `step(variables, carry, images, valid) -> (probabilities, carry)`.

    Probabilities are f[B, classes], or f[B, H, W, classes] of pixels, with the background first; a
    single logit of a pixel is that of the one class beside it. The step raises ValueError if the
    model's outputs have another form. `prepare` converts stored images to the model's inputs.
    """

    def step(
        variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        images = prepare(jnp.asarray(images), parameter_dtype(variables))
        outputs, carry = adaptation.predict(variables, carry, images, valid)
        axes = getattr(outputs, "ndim", 0)
        if axes not in (2, 4):
            raise ValueError(
                "the model's outputs are not logits f[B, classes] or f[B, H, W, classes], of which "
                "probabilities are made: pass batches through adaptation.predict itself"
            )
        return jax.nn.softmax(as_classes(outputs) if axes == 4 else outputs), carry

    return step
