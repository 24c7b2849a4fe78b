"""The rounds of a run as compiled programs: data on the device, or streamed from the host."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_bn.client import Load
from fedjax_bn.data.batches import (
    Batches,
    Draw,
    look_up,
    point_to,
    point_to_validation,
    stack_clients,
)
from fedjax_bn.federation import FederatedState
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment import Experiment, sampler
from fedjax_bn.run.stream import megabytes, stream_rounds
from fedjax_bn.selection import Find

Round = Callable[[FederatedState], tuple[FederatedState, dict[str, jax.Array]]]


class Rounds(NamedTuple):
    """How the rounds of a run get their data.

    Attributes:
      note: a sentence on which way was taken, and why.
      compile: `compile(state) -> round`, where `round(state) -> (state, metrics)` is the next round
        and donates the state.
    """

    note: str
    compile: Callable[[FederatedState], Round]


def open_rounds(
    config: ConfigDict, experiment: Experiment, keys: Any, state: FederatedState
) -> Rounds:
    """Puts the training data on the device where they fit, and else opens a stream.

    Both ways train on the same samples in the same order.

    Args:
      config: the run's.
      experiment: what it names.
      keys: with the random keys `data`, `method` and `participation`.
      state: before the next round.
    """
    splits = [domain.train for domain in experiment.internal.domains]
    longest = max(len(split.labels) for split in splits)
    row = splits[0].images[:1].nbytes / 2**20
    padded, limit = row * longest * len(splits), config.data.device_megabytes
    size = f"{megabytes(splits):.0f} MB of training samples"
    if padded <= limit:
        note = f"{size} stay on the device (data.device_megabytes={limit})"
        return Rounds(note, partial(resident_round, config, experiment, keys))
    draw = partial(
        jax.jit(partial(draw_round, config, experiment), static_argnums=0), longest, keys.data
    )
    batches = row * jax.eval_shape(draw, state.round).index.size
    note = (
        f"{size} are streamed, because {padded:.0f} MB pass data.device_megabytes={limit}; "
        f"a round's batches take {batches:.0f} MB of the device"
    )
    rounds = stream_rounds(splits, draw, int(state.round), config.rounds)
    return Rounds(note, partial(streamed_round, config, experiment, keys, rounds))


def draw_round(
    config: ConfigDict, experiment: Experiment, longest: int, key: jax.Array, number: jax.Array
) -> Draw:
    """Which samples a round trains on; the same on the device and for a stream."""
    splits = [domain.train for domain in experiment.internal.domains]
    sizes = jnp.asarray([len(split.labels) for split in splits], jnp.int32)
    return sampler(config, experiment.internal)(sizes, longest, jax.random.fold_in(key, number))


def resident_round(
    config: ConfigDict, experiment: Experiment, keys: Any, state: FederatedState
) -> Round:
    """Sampling, look-up, augmentation and the method's round as one program."""
    data = stack_clients([domain.train for domain in experiment.internal.domains])
    longest, kept = data.labels.shape[1], validation_data(config, experiment)

    @partial(jax.jit, donate_argnums=0)
    def round(state: FederatedState, data: Any, kept: Any, keys: Any) -> tuple:
        draw = sampler(config, experiment.internal)
        key = jax.random.fold_in(keys.data, state.round)
        batches = point_to(data, draw(data.sizes, longest, key))
        batches |= choose_participants(config, keys, state)
        images, (find, validation) = look_up(data), find_validation(kept)
        method = experiment.method_with(
            lambda key, numbers: augmented(experiment.augment, key, images(numbers)), find
        )
        return method.round(state, batches | validation, keys.method)

    # Keys are arguments: runs with other seeds find this program in JAX's compilation cache.
    compiled = round.lower(state, data, kept, keys).compile()
    return lambda state: compiled(state, data, kept, keys)


def streamed_round(
    config: ConfigDict,
    experiment: Experiment,
    keys: Any,
    batches: Iterator[Batches],
    state: FederatedState,
) -> Round:
    """Augmentation and the method's round as one program; the batches come from the host."""
    kept = validation_data(config, experiment)

    @partial(jax.jit, donate_argnums=0)
    def round(state: FederatedState, batches: Batches, kept: Any, keys: Any) -> tuple:
        find, validation = find_validation(kept)
        batches = batches | choose_participants(config, keys, state) | validation
        method = experiment.method_with(experiment.augment, find)
        return method.round(state, batches, keys.method)

    first = next(batches, None)
    if first is None:  # the last round is done
        return lambda state: (state, {})
    compiled = round.lower(state, first, kept, keys).compile()
    waiting = [first]

    def run(state: FederatedState) -> tuple:
        one = waiting.pop() if waiting else next(batches)
        return compiled(state, jax.device_put(one), kept, keys)

    return run


def validation_data(config: ConfigDict, experiment: Experiment) -> Any:
    """The clients' validation samples on the device, where they select by them; else ().

    Raises:
      ConfigError: they do not fit.
    """
    if not config.local_selection:
        return ()
    splits = [domain.validation for domain in experiment.internal.domains]
    size, limit = megabytes(splits), config.data.device_megabytes
    if size > limit:
        raise ConfigError(
            f"config.local_selection={config.local_selection} keeps the clients' {size:.0f} MB of "
            f"validation samples on the device, more than config.data.device_megabytes={limit}: "
            "raise it, lower config.data.validation, or set local_selection=0"
        )
    return point_to_validation(splits, config.eval_batch_size)


def find_validation(kept: Any) -> tuple[Find | None, Batches]:
    """What finds validation images by their numbers, and {"validation": the clients' batches}."""
    if not kept:
        return None, {}
    images, batches = kept
    return lambda numbers: images[numbers], {"validation": batches}


def augmented(augment: Load | None, key: jax.Array, images: jax.Array) -> jax.Array:
    """The images, changed where there is an augmentation."""
    return augment(key, images) if augment else images


def choose_participants(config: ConfigDict, keys: Any, state: FederatedState) -> Batches:
    """{"participates": bool[K]} where not all clients take part in a round, else {}."""
    num_clients = state.weights.shape[0]
    if not 0 < config.clients_per_round < num_clients:
        return {}
    key = jax.random.fold_in(keys.participation, state.round)
    order = jax.random.permutation(key, num_clients)
    return {"participates": order < config.clients_per_round}
