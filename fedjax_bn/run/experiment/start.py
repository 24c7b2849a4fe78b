"""What a run needs before its first round: the experiment, the random keys, the first state."""

import hashlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_bn import models, sharing
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.engine.backend import for_one_run
from fedjax_bn.federation import FederatedState
from fedjax_bn.models import pretrained
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.build import (
    Experiment,
    build,
    initial_variables,
)
from fedjax_bn.run.experiment.shapes import check_shapes
from fedjax_bn.run.experiment.starting_model import starting_model
from fedjax_bn.run.processes.mesh import everywhere, place_copies, shardings_of
from fedjax_bn.run.training.compilation_cache import keep_compiled
from fedjax_bn.run.training.population import Held, check_population, num_clients, on_disk
from fedjax_bn.run.training.tracking import check_tracking


class Keys(NamedTuple):
    """The random keys of a run, all from `config.seed`."""

    model: jax.Array
    method: jax.Array
    data: jax.Array
    participation: jax.Array


def prepare(
    config: ConfigDict,
    make: Callable[[ConfigDict], Experiment] = build,
    traced: bool = True,
    clients: int = 0,
) -> tuple[Experiment, Keys, Callable[[], FederatedState]]:
    """Builds the experiment, the keys and a function that makes the state before the first round.

    Args:
      config: the run's.
      make: builds the experiment.
      traced: whether a round is traced to see that it works, which takes a second or more.
      clients: how many there are in all, where the experiment has one of them and the state one
        row; 0 for those that it has.

    Raises:
      ConfigError: whatever is wrong with the configuration or the data it names.
    """
    keep_compiled(config.compilation_cache)
    check_tracking(config.wandb)
    sizes = (min(clients, 1), clients)
    try:
        experiment = make(config)
        check_population(config, len(experiment.internal.domains))
        keys = make_keys(config)
        if traced:
            check_shapes(config, experiment, make_start(config, experiment, keys, None, *sizes))
        fixed, notes = _load_pretrained(config, experiment)
        start = make_start(config, experiment, keys, fixed, *sizes)
        _check_rows_alike(config, experiment, keys)
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
    rows: int = 0,
    clients: int = 0,
) -> Callable[[], FederatedState]:
    """Returns `start() -> state` before the first round; `fixed` as `_load_pretrained` gives it.

    The state has `rows` rows, by default one a client, or one in all where they lie on the disk;
    its server's part is that of all `clients`, by default the experiment's.
    """
    clients = clients or len(experiment.internal.domains)
    rows = rows or (1 if on_disk(config, clients) else clients)

    def begin(fixed: sharing.Variables | None) -> FederatedState:
        variables = initial_variables(experiment, keys.model)
        if fixed is not None:
            variables = sharing.join(fixed, sharing.split_like(variables, fixed)[1])
        whole = experiment.method.init(keys.method, variables, clients)
        if rows == clients:
            return whole
        # Compiled, it makes nothing of the others' rows, which nobody reads.
        state = experiment.method.init(keys.method, variables, rows)._replace(server=whole.server)
        own = jax.tree.map(lambda leaf: leaf[:rows], (state.personal, state.memory))
        return state._replace(personal=own[0], memory=own[1])

    mesh = experiment.mesh
    if mesh is None:
        return partial(for_one_run(begin), fixed)
    form = jax.eval_shape(begin, fixed)
    spread = shardings_of(form, mesh) if rows == clients else everywhere(mesh)
    begin = for_one_run(begin, out_shardings=spread)
    return partial(begin, place_copies(fixed, mesh))


def _check_rows_alike(config: ConfigDict, experiment: Experiment, keys: Keys) -> None:
    """Raises ConfigError where rows lie on the disk and a weighing rule begins them differently.

    Personal leaves and memory begin alike by what `federate` is.
    """
    clients = len(experiment.internal.domains)
    start = make_start(config, experiment, keys, rows=clients)
    if not on_disk(config, clients) or not jax.eval_shape(start).weighing:
        return
    for leaf in jax.tree.leaves(jax.jit(lambda: start().weighing)()):
        if (leaf != leaf[:1]).any():
            raise ConfigError(
                f"config.weigh={brief(config.weigh)} begins with other memory for some clients "
                "than for others, which rows on the disk do not have: set population=device"
            )


def _load_pretrained(
    config: ConfigDict, experiment: Experiment
) -> tuple[sharing.Variables | None, tuple[str, ...]]:
    """What of the start comes from `config.start_from` or `pretrained`, None elsewhere, and notes.

    Raises:
      ValueError, OSError, ImportError: the weights are missing or do not fit.
    """
    like = jax.eval_shape(lambda key: initial_variables(experiment, key), jax.random.key(0))
    if config.start_from:
        note = f"all clients start from the model of the run {config.start_from} (start_from)"
        return starting_model(config, like), (note,)
    if not config.pretrained:
        known = (models.AlexNet, models.DenseNet, models.ResNet, models.YOLOv5)
        could = isinstance(inspect.unwrap(experiment.model), known)
        why = f"{config.model} starts from random weights, because pretrained is empty"
        return None, (why,) * could
    network = inspect.unwrap(experiment.model)
    variables, notes = pretrained.load(config.pretrained, network, like)
    fixed = jax.tree.map(
        lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf),
        variables,
    )
    return fixed, notes


def data_hash(experiment: Experiment) -> str:
    """SHA-256 of the data split, the unseen clients included, and of the trace if there is one."""
    domains = experiment.internal.domains + experiment.unseen
    data = fingerprint(experiment.internal._replace(domains=domains))
    if experiment.trace is None:
        return data
    return hashlib.sha256(data.encode() + experiment.trace.tobytes()).hexdigest()


def partition_table(config: ConfigDict, state: FederatedState | Held, modules: bool = True) -> str:
    """Which leaves are shared and which personal, with counts and bytes of one client.

    Args:
      config: the run's.
      state: before the next round.
      modules: whether it says so for each module, or in sums.
    """
    own = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state.personal
    )
    variables = sharing.join(state.shared, own)
    mask = jax.tree.map(lambda leaf: leaf is not None, state.shared, is_leaf=lambda x: x is None)
    return f"{config.method} on {config.model}, {num_clients(state):,} clients\n" + (
        sharing.describe(variables, mask, modules)
    )
