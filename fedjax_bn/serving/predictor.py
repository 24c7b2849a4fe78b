"""Predicts with a model, an adaptation, and the preprocessing of the model's training."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

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

    variables: PyTree
    start: Callable[[], PyTree]  # `start() -> carry`, the carry before the client's first batch
    # `step(variables, carry, images [B, ...], valid bool[B]) -> (probabilities f[B, C], carry)`;
    # f[B, H, W, C] of pixels if the model segments
    step: Callable[..., tuple[jax.Array, PyTree]]
    # raises ValueError for images [N, ...] of another form than the model was trained on
    check: Callable[[np.ndarray], None]
    batch_size: int  # B
    order: int  # the seed of the order in which a call passes images; -1 keeps the order given

    @classmethod
    def by_choice(
        cls,
        choice: Choice,
        variables: Variables,
        prepare: Prepare,
        check: Callable[[np.ndarray], None] = lambda images: None,
    ) -> Self:
        """Returns a predictor by an adaptation; `prepare` gives the model stored images."""

        def step(
            variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array
        ) -> tuple[jax.Array, PyTree]:
            images = prepare(jnp.asarray(images), parameter_dtype(variables))
            outputs, carry = choice.adaptation.predict(variables, carry, images, valid)
            axes = getattr(outputs, "ndim", 0)
            if axes not in (2, 4):
                raise ValueError("outputs are no logits f[B, classes] or f[B, H, W, classes]")
            return jax.nn.softmax(as_classes(outputs) if axes == 4 else outputs), carry

        variables = predicting(variables)  # an adaptation moves the parameters that predict
        start = partial(choice.adaptation.init, variables)
        return cls(variables, start, jax.jit(step), check, choice.batch_size, choice.order)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Returns probabilities f[N, C] of a client's images [N, ...], bytes if trained on bytes.

        They are f[N, H, W, C], of each pixel, if the model segments, with the background first.
        The adaptation gets batches in the order of `order`, as in `evaluate`. Images of another
        form than those of the training, or none, are a ValueError.
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
            valid = np.arange(self.batch_size) < count
            probabilities, carry = self.step(self.variables, carry, filled, valid)
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

    Raises ValueError if the method has no model, `adapt` does not suit it, or the variables are
    those of all clients.
    """
    if method.learned is None:
        raise ValueError("the method has no model: make it with `methods.learning.learning`")
    model = method.learned.model
    if adapt is None:
        choice = Choice(of_clients(model, method.statistics), batch_size, order=-1)
    else:
        choice = choose_adaptation(adapt, model, batch_size)
    # The method does not know the form of its images; `as_images` checks what holds for all.
    return Predictor.by_choice(choice, variables, method.learned.prepare)
