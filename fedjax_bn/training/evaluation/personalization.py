"""Sets aside labelled samples, to which a client adapts its model before it is tested.

Per-FedAvg (Fallah et al. 2020) trains a start for this, and UniFed tests that method this way, on
internal and external clients (sections 4.1.2 and 4.1.3). The labelled samples are drawn at random
from the split that is evaluated, and never count in the accuracy.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.division.by_class import number_groups
from fedjax_bn.data.domain import Dataset, Domain, Split, select, splits, whole
from fedjax_bn.engine.devices import apart
from fedjax_bn.federation import FederatedMethod, FederatedState
from fedjax_bn.methods.perfedavg import personalize
from fedjax_bn.sharing import Variables, join, with_frozen


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


def personalization_of(
    method: FederatedMethod,
    seed: int,
    samples: int | None = None,
    steps: int = 1,
    rate: float | None = None,
) -> Personalization | None:
    """Returns how clients adapt before they are tested; None values are the method's own."""
    usual = inspect.signature(personalize).parameters["inner_rate"].default
    own_samples, own_rate = method.personalize or (0, usual)
    samples = own_samples if samples is None else samples
    rate = own_rate if rate is None else rate
    return Personalization(samples, steps, rate, seed) if samples else None


def check_labelled(
    choice: Personalization | None, internal: Dataset, unseen: Sequence[Domain]
) -> None:
    """Raises ConfigError if a client has too few samples to label some and test the others."""
    if not choice:
        return
    if any(isinstance(domain.test.labels, dict) for domain in (*internal.domains, *unseen)):
        raise ConfigError(
            f"config.personalize_samples={choice.samples} adapts classifiers, but images of "
            f"{internal.name} have boxes or masks: set it to 0"
        )
    tested = [(domain.name, *part) for domain in internal.domains for part in splits(domain)]
    tested += [(domain.name, "whole", whole(domain)) for domain in unseen]
    for client, name, split in tested:
        if name == "train":
            continue
        labelled, unlabelled = _draw_labelled(split, choice)
        if len(labelled) < choice.samples or not len(unlabelled):
            raise ConfigError(
                f"config.personalize_samples={choice.samples}, but client {client!r} has "
                f"{len(split.images)} samples in its {name} split, too few to label these and test "
                "others: lower it, set it to 0 to test without personalization, or give the client "
                "more samples (data.test, data.validation)"
            )


def _draw_labelled(split: Split, choice: Personalization) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the labelled samples and of those that are tested, i64[n] and i64[m].

    Samples with one name, such as windows of a recording, are never on both sides: if some are
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
    """Returns the labelled samples of each split, and the tested ones in the split's order.

    A split that several clients have (the same object) stays one object, which is stored once.
    """
    divided = {
        id(split): tuple(select(split, index) for index in _draw_labelled(split, choice))
        for split in {id(split): split for split in parts}.values()
    }
    return tuple(zip(*(divided[id(split)] for split in parts), strict=True))


def local_steps(
    choice: Personalization, model: Any, prepare: Callable, statistics: Callable | None
) -> Callable[..., Variables]:
    """Returns `adapt(variables, images, labels)`: the model after a client's gradient steps."""
    options = {"prepare": prepare, "statistics": statistics}
    return partial(personalize, model, inner_rate=choice.rate, steps=choice.steps, **options)


def adapted_rows(
    steps: Callable[..., Variables], mesh: Mesh | None
) -> Callable[[FederatedState, Sequence[Split]], FederatedState]:
    """Returns `adapt(state, labelled)`, the state after each client's `steps`, on the mesh.

    All its leaves but frozen ones are personal. There is one labelled split for each row.
    """

    def on_device(common: tuple, rows: tuple, _: None) -> Variables:
        shared, frozen = common

        def adapted(row: tuple) -> Variables:
            variables = steps(with_frozen(join(shared, row[0]), frozen), *row[1:])
            return with_frozen(variables, None)

        # One client after another: side by side their gradients would need K times the memory.
        return jax.lax.map(adapted, rows)

    @jax.jit
    def adapted(state: FederatedState, images: jax.Array, labels: Any) -> FederatedState:
        rows = state.personal, images, labels
        personal = apart(on_device, mesh, (state.shared, state.frozen), rows)
        nothing = jax.tree.map(lambda leaf: None, state.shared)
        return state._replace(shared=nothing, personal=personal)

    def adapt(state: FederatedState, labelled: Sequence[Split]) -> FederatedState:
        images = np.stack([np.asarray(split.images) for split in labelled])
        labels = jax.tree.map(lambda *rows: np.stack(rows), *(split.labels for split in labelled))
        return adapted(state, images, labels)

    return adapt
