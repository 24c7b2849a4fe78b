"""Keeps the clients' own parts in the host's memory, for far more clients than a round trains.

Neither the device's memory nor the cost of a round then depends on the number of clients.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.adaptation import ensemble
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.federation import FederatedState
from fedjax_bn.training.experiment import Experiment

PyTree = Any
PARTS = ("personal", "memory", "weighing")  # of the state, with a row for each client


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PopulationState:
    """The state with `config.population=host`; a round changes `rows` and `trained` in place.

    Attributes:
      state: all that is not kept per client, as the state of a federation of one client. Its
        personal leaves are the mean over the last round in which any client counted, which an
        unseen client receives.
      rows: part -> tree of NumPy arrays [N, ...], the clients' own parts.
      cohort: i32[C], the clients drawn in the last round.
      trained: bool[N], which clients have trained in any round.
    """

    state: FederatedState
    rows: dict[str, PyTree]
    cohort: np.ndarray
    trained: np.ndarray

    # Code that reads a `FederatedState` finds these fields here, as of a federation of one.
    round = property(lambda self: self.state.round)
    shared = property(lambda self: self.state.shared)
    frozen = property(lambda self: self.state.frozen)
    server = property(lambda self: self.state.server)
    weights = property(lambda self: self.state.weights)
    personal = property(lambda self: self.state.personal)
    memory = property(lambda self: jax.tree.map(lambda leaf: leaf[:1], self.rows["memory"]))

    def rows_of(self, client: np.ndarray, parts: tuple[str, ...] = PARTS) -> dict[str, PyTree]:
        """Returns part -> rows [C, ...] of clients i[C]."""
        return {part: jax.tree.map(lambda leaf: leaf[client], self.rows[part]) for part in parts}

    def put_rows(self, client: np.ndarray, rows: dict[str, PyTree]) -> None:
        """Gives clients i[C], all different, new rows [C, ...], and marks them as trained."""
        jax.tree.map(lambda leaf, values: leaf.__setitem__(client, values), self.rows, rows)
        self.trained[client] = True


AnyState = FederatedState | PopulationState


def start_population(
    experiment: Experiment, start: Callable[[], FederatedState]
) -> Callable[[], AnyState]:
    """Returns `start`, or if rows are on the host what makes a `PopulationState` of its one row."""
    if not experiment.participation.on_host:
        return start
    num_clients = len(experiment.internal.domains)

    def repeated(leaf: jax.Array) -> np.ndarray | jax.Array:
        shape = (num_clients, *leaf.shape[1:])
        if isinstance(leaf, jax.core.Tracer):  # under `jax.eval_shape`
            return jnp.broadcast_to(leaf, shape)
        return np.array(np.broadcast_to(np.asarray(leaf), shape))

    def begin() -> PopulationState:
        state = start()
        rows = {part: jax.tree.map(repeated, getattr(state, part)) for part in PARTS}
        cohort = np.zeros(experiment.participation.drawn, np.int32)
        common = state._replace(memory=(), weighing=())
        return PopulationState(common, rows, cohort, np.zeros(num_clients, bool))

    return begin


def refuse_ensemble(adaptations: Iterable[str]) -> None:
    """Raises ConfigError if an adaptation needs the models of all clients at once."""
    if any(text.partition(":")[0] == ensemble.__name__ for text in adaptations):
        raise ConfigError(
            "config.adaptations has 'ensemble', which needs population=device: leave it out"
        )
