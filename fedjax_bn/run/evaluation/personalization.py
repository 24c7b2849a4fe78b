"""Testing after personalization: a client adapts its model by a few labelled samples of its own.

Per-FedAvg trains a start for it (Fallah et al. 2020), and UniFed tests that method so, internal
clients and external ones (sections 4.1.2 and 4.1.3). The labelled samples are drawn at random from
the samples that are evaluated and never count in the accuracy.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_bn.data.division.by_class import number_groups
from fedjax_bn.data.domain import Dataset, Domain, Split, select, splits, whole
from fedjax_bn.data.label_trees import has_boxes
from fedjax_bn.engine.devices import apart
from fedjax_bn.federation import FederatedMethod, FederatedState
from fedjax_bn.methods.perfedavg import personalize
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.sharing import Variables, join

PyTree = Any


class Personalization(NamedTuple):
    """How a client adapts before it is tested.

    Attributes:
      samples: labelled samples, at least 1.
      steps: gradient steps, at least 1.
      rate: their learning rate.
      seed: draws the samples.
    """

    samples: int
    steps: int
    rate: float
    seed: int


def choose_personalization(config: ConfigDict, method: FederatedMethod) -> Personalization | None:
    """Returns `config.personalize`, by default the method's own; None where no client adapts."""
    keys = config.personalize
    usual = inspect.signature(personalize).parameters["inner_rate"].default
    samples, rate = method.personalize or (0, usual)
    samples = samples if keys.samples is None else keys.samples
    rate = rate if keys.rate is None else keys.rate
    return Personalization(samples, keys.steps, rate, config.seed) if samples else None


def check_labelled(
    choice: Personalization | None, internal: Dataset, unseen: Sequence[Domain]
) -> None:
    """Raises ConfigError if a client has too few samples to label some and test the others."""
    if choice is None:
        return
    if any(has_boxes(domain.test.labels) for domain in (*internal.domains, *unseen)):
        raise ConfigError(
            f"config.personalize.samples={choice.samples} adapts classifiers, but images of "
            f"{internal.name} have boxes: set it to 0"
        )
    tested = [
        (domain.name, name, split)
        for domain in internal.domains
        for name, split in splits(domain)
        if name != "train"
    ]
    tested += [(domain.name, "whole", whole(domain)) for domain in unseen]
    for client, name, split in tested:
        labelled, rest = _draw_labelled(split, choice)
        if len(labelled) < choice.samples or not len(rest):
            raise ConfigError(
                f"config.personalize.samples={choice.samples}, but client {client!r} has "
                f"{len(split.images)} samples in its {name} split, too few to label these and test "
                "others: lower it, set it to 0 to test without personalization, or give the client "
                "more samples (data.test, data.validation)"
            )


def _draw_labelled(split: Split, choice: Personalization) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the labelled samples and of those that are tested, i64[n] and i64[m].

    Samples with one name, such as windows of a recording, are never on both sides: where some are
    labelled, the others of that name are not tested.
    """
    # The same samples in every round and every command, whatever else the run draws.
    group = number_groups(split.names, len(split.images))
    order = np.random.default_rng(choice.seed).permutation(len(group))
    labelled = order[: choice.samples]
    return labelled, np.flatnonzero(~np.isin(group, group[labelled]))


def set_aside(
    parts: Sequence[Split], choice: Personalization
) -> tuple[tuple[Split, ...], tuple[Split, ...]]:
    """Returns the labelled samples of each split, and those that are tested, in the split's order.

    A split that several clients have (the same object) stays one object, which is stored once.
    """
    done = {
        id(split): tuple(select(split, index) for index in _draw_labelled(split, choice))
        for split in {id(split): split for split in parts}.values()
    }
    return tuple(zip(*(done[id(split)] for split in parts), strict=True))


def adapt_rows(
    choice: Personalization, model: Any, mesh: Mesh | None = None, **options: Any
) -> Callable[[FederatedState, Sequence[Split]], FederatedState]:
    """Returns `adapt(state, labelled)`: each client's own model after its steps.

    All leaves of the state that it returns are personal. There is one labelled split for each row
    of the state.

    Args:
      choice: samples, steps and rate.
      model: linen module, images -> logits.
      mesh: the devices over which the state's clients are shared out; None for one.
      **options: `prepare` and `statistics` as in `methods.perfedavg.personalize`.
    """
    steps = partial(personalize, model, inner_rate=choice.rate, steps=choice.steps, **options)

    def on_device(shared: PyTree, rows: tuple, _: None) -> Variables:
        # One client after another: side by side their gradients would need K times the memory.
        return jax.lax.map(lambda row: steps(join(shared, row[0]), *row[1:]), rows)

    @jax.jit
    def adapted(state: FederatedState, images: jax.Array, labels: PyTree) -> FederatedState:
        personal = apart(on_device, mesh, state.shared, (state.personal, images, labels))
        nothing = jax.tree.map(lambda leaf: None, state.shared)
        return state._replace(shared=nothing, personal=personal)

    def adapt(state: FederatedState, labelled: Sequence[Split]) -> FederatedState:
        images = np.stack([np.asarray(split.images) for split in labelled])
        labels = jax.tree.map(lambda *rows: np.stack(rows), *(one.labels for one in labelled))
        return adapted(state, images, labels)

    return adapt


def adapt_unseen(
    choice: Personalization, model: Any, labelled: Sequence[Split], **options: Any
) -> list[Callable[[Variables], Variables]]:
    """Returns `adapt(variables)` of each unseen client: the received model after its steps.

    Arguments are those of `adapt_rows`; `labelled` are the samples of each client.
    """
    steps = partial(personalize, model, inner_rate=choice.rate, steps=choice.steps, **options)
    adapted = jax.jit(steps)
    return [
        partial(
            adapted,
            images=jnp.asarray(np.asarray(images)),
            labels=jax.tree.map(jnp.asarray, labels),
        )
        for images, labels, _ in labelled
    ]
