"""The server's side: what it keeps of a federation, and its step, without any data."""

import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.federation import FederatedState, Own, Upload, broadcast_of, traffic
from fedjax_bn.flower.accept import Accepted, absent, blank, side_by_side
from fedjax_bn.flower.members import Member
from fedjax_bn.flower.records import Order
from fedjax_bn.flower.settings import Run
from fedjax_bn.flower.site import deployed
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.availability import Participation, read_trace
from fedjax_bn.run.experiment.build import Experiment, assemble
from fedjax_bn.run.experiment.method import local_epochs
from fedjax_bn.run.experiment.start import (
    Keys,
    batches_of_one,
    make_start,
    partition_table,
    prepare,
)
from fedjax_bn.run.experiment.values import choose_participation
from fedjax_bn.run.files.finished import dataset_of
from fedjax_bn.run.files.forms import CLAIM, NUMBER, TEXT
from fedjax_bn.run.files.workdir import read_json

PyTree = Any
_ABOUT = CLAIM | {"sizes": {"longest": NUMBER, "smallest": NUMBER}, "samples": TEXT}


class Kept(NamedTuple):
    """What the server remembers between rounds, and what its checkpoints hold.

    Attributes:
      state: the federation's, [K] where it is by client, without the clients' own parts.
      served: the mean of the personal leaves over the last round that counted, what an unseen
        client receives; () where clients do not send them.
      taken: i32[K], rounds finished when an upload of each client was last taken.
    """

    state: FederatedState
    served: PyTree
    taken: jax.Array

    round = property(lambda self: self.state.round)


class Host(NamedTuple):
    """What a server builds before its first round.

    Attributes:
      config: the configuration.
      run: the run config.
      experiment: what the configuration names, with one blank client.
      keys: the run's random keys.
      one: makes the common start, a state with the row of one client.
      start: makes what is kept before the first round.
      order: the header of its messages, with begin=0.
      form: of the samples of all clients, as JSON.
      upload: the form of one client's upload.
      personal: the form of the personal leaves that are sent; () for none.
      table: which leaves are shared and which personal, to read at start.
      traffic: the method's own account, see `fedjax_bn.federation`.
      participation: who takes part in a round.
      step: `step(kept, accepted, rows) -> kept`, a round's end.
    """

    config: ConfigDict
    run: Run
    experiment: Experiment
    keys: Keys
    one: Callable[[], FederatedState]
    start: Callable[[], Kept]
    order: Order
    form: str
    upload: Upload
    personal: PyTree
    table: str
    traffic: dict[str, int]
    participation: Participation
    step: Callable[..., Kept]


def facts_of(workdir: Path, run: Run, method: str) -> tuple[Order, str]:
    """Returns what the workdir holds of a begun federation; of a new one its name, drawn here.

    Args:
      workdir: the server's.
      run: the run config.
      method: the configured method's name.

    Returns:
      The header of the server's messages with begin=0, and the form of samples as JSON, "" where
      it is not known yet.

    Raises:
      WorkdirError: its config.json is damaged.
    """
    path = workdir / "config.json"
    if not path.exists():
        name = f"{method}-{secrets.token_hex(8)}"
        return Order(name, method, 0, run.clients, 0, 0, run.serve_unseen), ""
    about = read_json(path, _ABOUT)
    longest, smallest = about["sizes"]["longest"], about["sizes"]["smallest"]
    order = Order(about["data"], method, 0, run.clients, longest, smallest, run.serve_unseen)
    return order, about["samples"]


def known_from(order: Order, form: str, members: Mapping[int, Member]) -> tuple[Order, str]:
    """Returns the same, for a new federation with what its first clients report.

    Args:
      order, form: as `facts_of` gives them.
      members: who has presented itself, by number; at least one where the form is not known.

    Returns:
      The header with the sizes of the largest and the smallest client (0 where none reports its
      own), and the form of samples that most have; of two as frequent that of the client of the
      least number.
    """
    if form:
        return order, form
    sizes = [member.size for member in members.values() if member.size] or [0]
    forms = Counter(members[k].form for k in sorted(members))
    return order._replace(longest=max(sizes), smallest=min(sizes)), forms.most_common(1)[0][0]


def open_host(config: ConfigDict, run: Run, order: Order, form: str) -> Host:
    """Builds what the configuration names for samples of a form.

    Args:
      config: the configuration.
      run: the run config.
      order, form: as `known_from` gives them.

    Raises:
      ConfigError: it does not suit, or a key does not suit the number of clients.
    """
    epochs, count = local_epochs(config), run.clients
    if len(epochs) > 1 and len(epochs) != count:
        raise ConfigError(
            f"config.client_epochs has {len(epochs)} numbers for the {count} clients of the "
            "run config: give one for each"
        )
    if config.clients_per_round > count:
        raise ConfigError(
            f"config.clients_per_round={config.clients_per_round} is more than the {count} "
            "clients of the run config: use 0 for all of them"
        )
    alone = deployed(config)
    alone.target = ""
    internal = dataset_of(json.loads(form) | {"dataset": "federation", "clients": ["federation"]})
    make = partial(assemble, internal=internal, unseen=())
    experiment, keys, one = prepare(alone, make, clients=count)
    rows = make_start(experiment, keys, rows=count, clients=count)

    def start() -> Kept:
        state = one()
        weights, weighing = jax.jit(lambda: (rows().weights, rows().weighing))()
        served = jax.tree.map(lambda leaf: leaf[0], state.personal) if run.serve_unseen else ()
        state = state._replace(weights=weights, weighing=weighing, personal=(), memory=())
        return Kept(state, served, jnp.zeros(count, jnp.int32))

    like = jax.eval_shape(one)
    own = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), Own(like.personal, like.memory)
    )
    batches = batches_of_one(experiment)
    batches["population"] = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.eval_shape(jax.random.key, 0)
    personal = own.personal if run.serve_unseen else ()
    _, upload = jax.eval_shape(experiment.method.client, broadcast_of(like), own, batches, key)
    return Host(
        config=config,
        run=run,
        experiment=experiment,
        keys=keys,
        one=one,
        start=start,
        order=order,
        form=form,
        upload=upload,
        personal=personal,
        table=partition_table(experiment, jax.eval_shape(rows)),
        traffic=traffic(experiment.method, like, batches),
        participation=choose_participation(config, count)._replace(
            trace=read_trace(config.participation.trace, count)
        ),
        step=_step(experiment.method.server, upload, personal),
    )


def _step(server: Callable, form: Upload, personal: PyTree) -> Callable[..., Kept]:
    """Returns `step(kept, accepted, rows) -> kept`: the method's server on what was accepted."""

    @jax.jit
    def step(kept: Kept, uploads: Upload, parts: PyTree) -> Kept:
        state, client = server(kept.state, uploads), uploads.client
        counts = uploads.participates & (state.weights[client] > 0)
        weights = jnp.where(counts, state.weights[client], 0)
        served = kept.served
        if jax.tree.leaves(served):
            mean = weighted_mean(parts, weights)
            served = jax.tree.map(lambda new, old: jnp.where(counts.any(), new, old), mean, served)
        taken = jnp.where(uploads.participates, state.round, kept.taken[client])
        return Kept(state, served, kept.taken.at[client].set(taken))

    stack = side_by_side((form, personal))

    def take(kept: Kept, accepted: Mapping[int, Accepted], rows: np.ndarray) -> Kept:
        """`accepted` by client; `rows` i32[C] are all that the round could have had."""
        population = len(kept.taken)
        parts = [
            (accepted[k].upload, accepted[k].personal)
            if k in accepted
            else (absent(form, k, population), blank(personal))
            for k in rows
        ]
        # Until it has ended it may read what `stack` gave.
        return jax.block_until_ready(step(kept, *stack(parts)))

    return take
