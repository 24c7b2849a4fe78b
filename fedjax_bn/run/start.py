"""What a run needs before its first round: the experiment, the random keys, the first state."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_bn import models, sharing
from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.federation import FederatedState
from fedjax_bn.models import pretrained
from fedjax_bn.run.compilation_cache import keep_compiled
from fedjax_bn.run.configured_method import start_notes, with_method_parts
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment import (
    Experiment,
    build,
    initial_variables,
    sample_input,
)
from fedjax_bn.run.shapes import check_shapes


class Keys(NamedTuple):
    """The random keys of a run, all from `config.seed`."""

    model: jax.Array
    method: jax.Array
    data: jax.Array
    participation: jax.Array


def prepare(config: ConfigDict) -> tuple[Experiment, Keys, Callable[[], FederatedState]]:
    """Builds the experiment, the keys and a function that makes the state before the first round.

    Raises:
      ConfigError: whatever is wrong with the configuration or the data it names.
    """
    keep_compiled(config.compilation_cache)
    try:
        experiment = build(config)
        keys = make_keys(config)
        check_shapes(config, experiment, make_start(config, experiment, keys))
        fixed, notes = _load_pretrained(config, experiment)
        start = make_start(config, experiment, keys, fixed)
        return experiment._replace(notes=experiment.notes + notes), keys, start
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


def make_keys(config: ConfigDict) -> Keys:
    """The random keys of a run."""
    return Keys(*jax.random.split(jax.random.key(config.seed), len(Keys._fields)))


def make_start(
    config: ConfigDict,
    experiment: Experiment,
    keys: Keys,
    fixed: sharing.Variables | None = None,
) -> Callable[[], FederatedState]:
    """Returns `start() -> state` before the first round; `fixed` as `_load_pretrained` gives it."""

    @jax.jit
    def begin(fixed: sharing.Variables | None) -> FederatedState:
        variables = initial_variables(experiment, keys.model)
        if fixed is not None:
            variables = sharing.join(fixed, sharing.split_like(variables, fixed)[1])
        images = sample_input(experiment.internal, experiment.prepare, 2)
        key = jax.random.fold_in(keys.model, 1)
        variables = with_method_parts(config, experiment.model, variables, images, key)
        return experiment.method.init(keys.method, variables, len(experiment.internal.domains))

    return partial(begin, fixed)


def _load_pretrained(
    config: ConfigDict, experiment: Experiment
) -> tuple[sharing.Variables | None, tuple[str, ...]]:
    """What of the start comes from `config.pretrained`, None elsewhere, and sentences on it.

    Raises:
      ValueError, OSError, ImportError: the weights are missing or do not fit.
    """
    if not config.pretrained:
        known = (models.AlexNet, models.DenseNet, models.ResNet, models.YOLOv5)
        could = isinstance(inspect.unwrap(experiment.model), known) and not start_notes(config)
        why = f"{config.model} starts from random weights, because pretrained is empty"
        return None, (why,) * could
    like = jax.eval_shape(lambda key: initial_variables(experiment, key), jax.random.key(0))
    network = inspect.unwrap(experiment.model)
    variables, notes = pretrained.load(config.pretrained, network, like)
    fixed = jax.tree.map(
        lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf),
        variables,
    )
    return fixed, notes


def data_hash(experiment: Experiment) -> str:
    """SHA-256 of the data split, the unseen clients included."""
    domains = experiment.internal.domains + experiment.unseen
    return fingerprint(experiment.internal._replace(domains=domains))


def partition_table(config: ConfigDict, state: FederatedState) -> str:
    """Which leaves are shared and which personal, with counts and bytes of one client."""
    own = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state.personal
    )
    variables = sharing.join(state.shared, own)
    mask = jax.tree.map(lambda leaf: leaf is not None, state.shared, is_leaf=lambda x: x is None)
    return f"{config.method} on {config.model}, {state.weights.shape[0]} clients\n" + (
        sharing.describe(variables, mask)
    )
