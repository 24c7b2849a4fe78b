"""Makes the state before the first round, and checks and describes it."""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.choices import naming
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.data.domain import Dataset, Split
from fedjax_bn.data.sampling import label_forms
from fedjax_bn.engine.backend import for_one_run
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.devices import over_devices
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.images import Prepare
from fedjax_bn.federation import FederatedState, broadcast_of, own_of
from fedjax_bn.normalization import calls
from fedjax_bn.sharing import Variables, describe, join, split_like
from fedjax_bn.training.evaluation.evaluate import served_variables
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.mesh import copies_on, place_copies, shardings_of
from fedjax_bn.training.population import AnyState, PopulationState
from fedjax_bn.training.programs import made_once

_Form = jax.ShapeDtypeStruct


class Keys(NamedTuple):
    """The random keys of a run, all from `config.seed`."""

    model: jax.Array
    method: jax.Array
    data: jax.Array
    participation: jax.Array


def make_keys(seed: int) -> Keys:
    """Returns the random keys of a run, from its `config.seed`."""
    # Every random number of a run depends on the order of the fields and on their number.
    return Keys(*jax.random.split(jax.random.key(seed), len(Keys._fields)))


def make_start(
    experiment: Experiment,
    keys: Keys,
    fixed: Variables | None = None,
    rows: int = 0,
    clients: int = 0,
) -> Callable[[], FederatedState]:
    """Returns `start() -> state` before the first round.

    `fixed` has the model's collections, with None for leaves that start at random. `rows` are those
    of the state, by default one per client, and `clients` those of the server's part.
    """
    clients = clients or len(experiment.internal.domains)
    rows = rows or (1 if experiment.participation.on_host else clients)
    method, model, mesh = experiment.method, experiment.model, experiment.mesh
    images = sample_input(experiment.internal, experiment.prepare, 2)

    def begin(keys: Keys, fixed: Variables | None) -> FederatedState:
        variables = calls.init_variables(model, keys.model, images)
        if fixed is not None:
            variables = join(fixed, split_like(variables, fixed)[1])
        with over_devices(mesh):
            full_state = method.init(keys.method, variables, clients)
            if rows == clients:
                return full_state
            # XLA removes the rows of `full_state` from the program, because nothing reads them.
            state = method.init(keys.method, variables, rows)
        state = state._replace(server=full_state.server, weighing=full_state.weighing)
        parts = (state.personal, state.memory, state.weighing)
        personal, memory, weighing = jax.tree.map(lambda leaf: leaf[:rows], parts)
        return state._replace(personal=personal, memory=memory, weighing=weighing)

    def compiled() -> Callable[[Keys, Variables | None], FederatedState]:
        spread = copies_on(mesh)
        if mesh is not None and rows == clients:
            # Each device makes its own clients' rows, so no device holds the state of all clients.
            spread = shardings_of(jax.eval_shape(begin, keys, fixed), mesh)
        return for_one_run(begin, out_shardings=spread)

    key = "start", method.init, model, rows, clients, mesh
    program = made_once(key, compiled, (images, fixed))
    return partial(program, *place_copies((keys, fixed), mesh))


def check_shapes(
    experiment: Experiment, start: Callable[[], FederatedState], clients: int = 0
) -> None:
    """Raises ValueError if model, method and adaptations do not suit each other; only traces."""
    method, plan = experiment.method, experiment.plan
    with naming(f"config.method={brief(plan.method)} on config.model={brief(plan.model)}"):
        state = jax.eval_shape(start)
        personal = jax.eval_shape(lambda state: own_of(state, 0), state)
        key, batches = jax.eval_shape(jax.random.key, 0), batches_of_one(experiment)
        _, upload = jax.eval_shape(method.client, broadcast_of(state), personal, batches, key)
        # As many rows and uploads as in a round, because a rule may need some number of them; the
        # state may have one row for all `clients`.
        clients = clients or state.weights.shape[0]
        rows = (state.weights, state.weighing)
        rows = jax.tree.map(lambda leaf: _Form((clients, *leaf.shape[1:]), leaf.dtype), rows)
        state = state._replace(weights=rows[0], weighing=rows[1])
        drawn = experiment.participation.drawn or clients
        uploads = jax.tree.map(lambda leaf: _Form((drawn, *leaf.shape), leaf.dtype), upload)
        jax.eval_shape(method.server, state, uploads)
    _trace_adaptations(experiment, state)


def _trace_adaptations(experiment: Experiment, state: FederatedState) -> None:
    """Raises ValueError if an adaptation cannot take an unseen client's first batch."""

    def first_prediction(spelling: str, state: Any, images: jax.Array, valid: jax.Array) -> Any:
        init, predict = experiment.adaptations[spelling].adaptation
        variables = served_variables(state, [spelling])
        images = experiment.prepare(images, parameter_dtype(variables))
        return predict(variables, init(variables), images, valid)

    for spelling, choice in experiment.adaptations.items() if experiment.unseen else ():
        like, size = experiment.unseen[0].test.images, choice.batch_size
        forms = _Form((size, *like.shape[1:]), like.dtype), _Form((size,), bool)
        with naming(f"config.adaptations={brief(spelling)} on config.model"):
            jax.eval_shape(partial(first_prediction, spelling), state, *forms)


def batches_of_one(experiment: Experiment) -> Batches:
    """Returns the shapes of what one client trains on in a round, see `engine.batches`."""
    domains, sizes = experiment.internal.domains, experiment.train_sizes()
    draw = experiment.work.sampler(min(sizes), max(sizes))
    client = _Form((1,), jnp.int32)
    drawn = jax.eval_shape(lambda x: draw(x, x, max(sizes), jax.random.key(0)), client)

    def forms(split: Split, place: tuple[int, ...]) -> Batches:
        return {"label": label_forms(split, place), "valid": _Form(place, bool)}

    place, images = drawn.index.shape[1:], domains[0].train.images
    batches = forms(domains[0].train, place) | {
        "image": _Form(place, jnp.int32),
        "size": _Form((), jnp.int32),
        "client": _Form((), jnp.int32),
        "source": _Form((max(sizes), *images.shape[1:]), images.dtype),
    }
    if experiment.validates:  # in the form of `sampling.validation_batches`
        longest = max(len(domain.validation.images) for domain in domains)
        size = min(experiment.evaluation.batch_size, longest)
        place = (math.ceil(longest / size), size)
        batches["validation"] = forms(domains[0].validation, place)
        batches["validation"]["image"] = _Form((*place, *images.shape[1:]), images.dtype)
    return batches


def data_hash(experiment: Experiment) -> str:
    """Returns the SHA-256 of the data split, unseen clients included, and of the trace if any."""
    domains = experiment.internal.domains + experiment.unseen
    data = fingerprint(experiment.internal._replace(domains=domains))
    if (trace := experiment.participation.trace) is None:
        return data
    return hashlib.sha256(data.encode() + trace.tobytes()).hexdigest()


def partition_table(experiment: Experiment, state: AnyState, modules: bool = True) -> str:
    """Returns a table of shared, personal and frozen leaves, by module or only their sums."""
    client_form = jax.tree.map(lambda leaf: _Form(leaf.shape[1:], leaf.dtype), state.personal)
    variables = join(state.shared, client_form)
    mask = jax.tree.map(lambda leaf, shared_leaf: shared_leaf is not None, variables, state.shared)
    count = len(state.trained if isinstance(state, PopulationState) else state.weights)
    title = f"{experiment.plan.method} on {experiment.plan.model}, {count:,} clients"
    return f"{title}\n{describe(variables, mask, modules, state.frozen)}"


def initial_variables(experiment: Experiment, key: jax.Array) -> Variables:
    """Returns the random variables from which all clients start."""
    images = sample_input(experiment.internal, experiment.prepare, 2)
    return calls.init_variables(experiment.model, key, images)


def sample_input(dataset: Dataset, prepare: Prepare, batch_size: int) -> jax.Array:
    """Returns zeros in the form that the model reads, f[B, ...]."""
    images = dataset.domains[0].train.images
    return prepare(jnp.zeros((batch_size, *images.shape[1:]), images.dtype), jnp.float32)
