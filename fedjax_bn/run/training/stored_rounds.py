"""The rounds of a population whose clients' own parts are on the disk, see `population`.

The device holds what the clients share and the rows of one cohort; on a mesh each device has its
own clients' rows, and rows of padding repeat the last client's. The batches of the next cohort are
read while this one trains (`stream`). Its rows are read afterwards, because a client may be in both
cohorts. Each process reads the rows of its own devices, and the first writes all.
"""

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.data.sampling import validation_batches
from fedjax_bn.engine.backend import compile_quickly
from fedjax_bn.engine.batches import Batches
from fedjax_bn.federation import FederatedMethod, FederatedState
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.experiment.method import what_validates
from fedjax_bn.run.processes.mesh import (
    clients_of,
    copies_on,
    fetched,
    own_rows,
    place_copies,
    place_own,
)
from fedjax_bn.run.processes.together import by_first
from fedjax_bn.run.training.population import PARTS, Held, rows_of_clients
from fedjax_bn.run.training.rounds import ABSENT, Drawn, Rounds, drawing_of, one_row
from fedjax_bn.run.training.stream import forms_of, megabytes, stream_rounds

_PADDED, _WHOLE = ("personal", "memory"), ("weighing",)  # parts with rows of padding, and without


def open_stored_rounds(config: ConfigDict, experiment: Experiment, keys: Any, held: Held) -> Rounds:
    """As `rounds.open_rounds`, for rows in a store; training data are always streamed."""
    domains, over = experiment.internal.domains, clients_of(experiment.mesh)
    splits, lock = [domain.train for domain in domains], threading.Lock()
    draw = jax.jit(drawing_of(experiment))
    known = lru_cache(4)(lambda number: jax.device_get(draw(keys, number)))

    def drawn(number: int) -> Drawn:
        with lock:  # many threads ask, and each round is drawn once
            return known(number)

    validates, batch_size = bool(what_validates(config)), config.eval_batch_size

    def validation(client: np.ndarray) -> Batches:
        """Returns {"validation": samples of some clients} if training needs them, else {}."""
        if not validates:
            return {}
        longest = max(len(domain.validation.images) for domain in domains)
        chosen = [domains[k].validation for k in client]
        return {"validation": validation_batches(chosen, batch_size, longest=longest)}

    shape = jax.eval_shape(draw, keys, held.round).samples.index.shape
    own = own_rows(shape[0], over)
    streamed = stream_rounds(splits, lambda n: drawn(n)[1:3], int(held.round), config.rounds, own)

    def compile(held: Held) -> Callable[[Held], tuple[Held, dict[str, np.ndarray]]]:
        """Returns the next round as `round(held) -> (held, metrics [N])`."""
        waiting = next(streamed, None)
        if waiting is None:  # the last round is done
            return lambda held: (held, {})
        num_clients, mesh, copies = len(domains), experiment.mesh, copies_on(experiment.mesh)
        key = place_copies(keys.method, mesh)

        def inputs(held: Held, batches: Batches) -> tuple[np.ndarray, tuple]:
            """Returns the next cohort's numbers, and the arguments of the compiled round."""
            client, numbers, _, present = drawn(int(held.round))
            known = np.minimum(numbers[own], num_clients - 1)
            batches = batches | {name: leaf[own] for name, leaf in present.items()}
            batches |= {"client": numbers[own]} | validation(known)
            mine = rows_of_clients(held, known, _PADDED), batches
            rows, batches = place_own(own, len(numbers), over, mine)
            rows |= place_copies(rows_of_clients(held, client, _WHOLE), mesh)
            return client, (held.state, rows, batches, key)

        by_row = dict.fromkeys(_PADDED, over) | dict.fromkeys(_WHOLE, copies)
        first = inputs(held, waiting)[1]
        program = jax.jit(
            partial(_round, experiment.method, num_clients),
            static_argnums=0,
            donate_argnums=(1, 2),
            out_shardings=None if mesh is None else (copies, by_row, copies),
        )
        compiled = compile_quickly(program.lower(len(held.client), *first))
        del first  # its rows are donated; each round places its own

        def round(held: Held) -> tuple[Held, dict[str, np.ndarray]]:
            nonlocal waiting
            batches, waiting = waiting if waiting is not None else next(streamed), None
            client, given = inputs(held, batches)
            state, rows, metrics = compiled(*given)
            rows, metrics = fetched((rows, metrics), mesh)
            # The others keep their rows: clients that sat out, and updates that are not finite.
            trained = np.flatnonzero(np.isfinite(metrics["loss"]) & metrics["finite"])
            new = jax.tree.map(lambda x: x[trained], rows)
            slots = held.store.new_slots(np.asarray(held.slots), client[trained])
            # No process reads rows of the next round before these are written.
            by_first(lambda: held.store.write(slots, client[trained], new))
            told = {"server_finite": metrics["server_finite"]}
            for name, value in ABSENT.items():
                told[name] = np.full(num_clients, value, metrics[name].dtype)
                told[name][client] = metrics[name]
            return Held(state, held.first, client, slots, held.store), told

        return round

    like = forms_of(splits[0], shape[1:]) | jax.tree.map(one_row, validation(np.arange(1)))
    note = f"{megabytes(splits):.0f} MB of training samples are streamed, as those of a population"
    return Rounds(note, like, compile)


def _round(
    method: FederatedMethod,
    num_clients: int,
    drawn: int,
    state: FederatedState,
    rows: dict[str, Any],
    batches: Batches,
    key: jax.Array,
) -> tuple[FederatedState, dict[str, Any], dict[str, jax.Array]]:
    """Returns the next state, new rows and metrics of a cohort of `drawn` clients, out of N.

    The state has the form of `Held.state`; `rows` are part -> tree [P, ...], with those of padding.
    """
    before = state.personal
    cohort = state._replace(weights=jnp.zeros_like(state.weights, shape=drawn), **rows)
    population = jnp.asarray(num_clients, jnp.int32)
    after, metrics = method.round(cohort, batches | {"population": population}, key)
    weights = metrics["weights"]
    # If no client counts, an unseen client receives what it would have received before.
    counted = weights.sum() > 0
    mean = weighted_mean(jax.tree.map(lambda leaf: leaf[:drawn], after.personal), weights)
    mean = jax.tree.map(lambda new, old: jnp.where(counted, new, old[0])[None], mean, before)
    rows = {part: getattr(after, part) for part in PARTS}
    kept = after._replace(weights=state.weights, personal=mean, memory=(), weighing=())
    return kept, rows, {name: metrics[name] for name in (*ABSENT, "server_finite")}
