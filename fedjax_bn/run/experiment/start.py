"""Prepares a run: the experiment, the random keys, and the state before the first round.

With `start_from` the first state has the model of a finished run. Only the arrays of its checkpoint
are read: no code that the other workdir names is imported.
"""

import hashlib
import importlib.util
import inspect
import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_bn import models
from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.arguments.choices import naming
from fedjax_bn.arguments.errors import ConfigError, UserError, as_config_errors
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.data.regular_files import Refused, read_regular
from fedjax_bn.data.sampling import label_forms
from fedjax_bn.engine.backend import for_one_run, on_cpu
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.devices import padded
from fedjax_bn.federation import FederatedState, broadcast_of, own_of
from fedjax_bn.models import pretrained
from fedjax_bn.run.experiment.build import Experiment, build, initial_variables
from fedjax_bn.sharing import Variables, describe, filled, join, path_names, split_like
from fedjax_bn.training import checkpoint
from fedjax_bn.training.compilation_cache import keep_compiled
from fedjax_bn.training.evaluation.evaluate import trace_adaptations
from fedjax_bn.training.mesh import copies_on, place_copies, shardings_of
from fedjax_bn.training.population import Held, num_clients
from fedjax_bn.training.workdir import CLAIM, Record, read_json

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
      traced: whether to trace a round as a check, which takes a second or more.
      clients: K, if the experiment has only one of the clients and the state only one row; 0 for
        the number of clients in the experiment.

    Raises:
      ConfigError: the configuration or the data that it names cannot be used.
    """
    keep_compiled(config.compilation_cache)
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"config.wandb={config.wandb!r} needs the package wandb, which is not installed: "
            "`pip install wandb`, or leave it empty and see the run in TensorBoard"
        )
    sizes = (min(clients, 1), clients)
    with as_config_errors():
        experiment = make(config)
        keys = make_keys(config.seed)
        if traced:
            check_shapes(experiment, make_start(experiment, keys, None, *sizes), clients)
        fixed, notes = _load_weights(experiment)
        start = make_start(experiment, keys, fixed, *sizes)
        if experiment.participation.on_disk:
            _check_rows_alike(experiment, keys)
        return experiment._replace(notes=experiment.notes + notes), keys, start


def make_start(
    experiment: Experiment,
    keys: Keys,
    fixed: Variables | None = None,
    rows: int = 0,
    clients: int = 0,
) -> Callable[[], FederatedState]:
    """Returns `start() -> state` before the first round.

    Args:
      experiment: the run's.
      keys: its random keys.
      fixed: the model's collections, with None for leaves that start at random; None if all do.
      rows: of the state; by default one per client, or a single one if rows are kept on the disk.
      clients: number of clients in the server's part; by default the experiment's.
    """
    clients = clients or len(experiment.internal.domains)
    rows = rows or (1 if experiment.participation.on_disk else clients)

    def begin(fixed: Variables | None) -> FederatedState:
        variables = initial_variables(experiment, keys.model)
        if fixed is not None:
            variables = join(fixed, split_like(variables, fixed)[1])
        whole = experiment.method.init(keys.method, variables, clients)
        if rows == clients:
            return whole
        # XLA removes the rows of `whole` from the compiled program, because nothing reads them.
        state = experiment.method.init(keys.method, variables, rows)._replace(server=whole.server)
        own = jax.tree.map(lambda leaf: leaf[:rows], (state.personal, state.memory))
        return state._replace(personal=own[0], memory=own[1])

    mesh = experiment.mesh
    if mesh is None:
        return partial(for_one_run(begin), fixed)
    # Each device makes its own clients' rows, so no device holds the state of all clients.
    form = jax.eval_shape(begin, fixed)
    spread = shardings_of(form, mesh) if rows == clients else copies_on(mesh)
    begin = for_one_run(begin, out_shardings=spread)
    return partial(begin, place_copies(fixed, mesh))


def check_shapes(
    experiment: Experiment, start: Callable[[], FederatedState], clients: int = 0
) -> None:
    """Traces the first state, a client's round and the server's step; nothing is compiled.

    `clients` is K if the state has only one row, else 0.

    Raises:
      ConfigError: the state is larger than this machine's memory.
      ValueError: the model, the method and their arguments do not suit each other.
    """
    method, plan = experiment.method, experiment.plan
    with naming(f"config.method={brief(plan.method)} on config.model={brief(plan.model)}"):
        state = jax.eval_shape(start)
        rows = state.weights.shape[0]
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        with suppress(AttributeError, ValueError, OSError):  # no POSIX system
            limit = limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # On CPU all devices share one machine's memory, which `limit` already counts whole.
        memory = (limit or math.inf) * (1 if on_cpu() else padded(1, experiment.mesh))
        if size > memory:
            raise ConfigError(
                f"config.model={brief(plan.model)} takes {size / 2**30:.0f} GB for the {rows} "
                f"clients' state, more than the {memory / 2**30:.0f} GB of this machine: choose a "
                "smaller model or fewer clients, or, where clients_per_round are not all, "
                "population=disk"
            )
        own = jax.eval_shape(lambda state: own_of(state, 0), state)
        key = jax.eval_shape(jax.random.key, 0)
        batches = batches_of_one(experiment)
        _, upload = jax.eval_shape(method.client, broadcast_of(state), own, batches, key)
        # As many rows and uploads as in a round, because a rule may need some number of them.
        both, clients = (state.weights, state.weighing), clients or rows
        both = jax.tree.map(lambda leaf: _Form((clients, *leaf.shape[1:]), leaf.dtype), both)
        state = state._replace(weights=both[0], weighing=both[1])
        drawn = experiment.participation.drawn or clients
        uploads = jax.tree.map(lambda leaf: _Form((drawn, *leaf.shape), leaf.dtype), upload)
        jax.eval_shape(method.server, state, uploads)
    trace_adaptations(experiment, state)


def batches_of_one(experiment: Experiment) -> Batches:
    """Returns the shapes of what one client trains on in a round, see `engine.batches`."""
    domains = experiment.internal.domains
    longest = max(len(domain.train.images) for domain in domains)
    draw = experiment.sampler()
    one, key = _Form((1,), jnp.int32), jax.eval_shape(jax.random.key, 0)
    drawn = jax.eval_shape(lambda sizes, who, key: draw(sizes, who, longest, key), one, one, key)
    place, images = drawn.index.shape[1:], domains[0].train.images
    batches = {
        "image": _Form(place, jnp.int32),
        "label": label_forms(domains[0].train, place),
        "valid": _Form(place, bool),
        "size": _Form((), jnp.int32),
        "client": _Form((), jnp.int32),
        "source": _Form((longest, *images.shape[1:]), images.dtype),
    }
    if experiment.validates:  # in the form of `sampling.validation_batches`
        splits = [domain.validation for domain in domains]
        longest = max(len(split.images) for split in splits)
        size = min(experiment.evaluation.batch_size, longest)
        place = (math.ceil(longest / size), size)
        batches["validation"] = {
            "image": _Form((*place, *images.shape[1:]), images.dtype),
            "label": label_forms(splits[0], place),
            "valid": _Form(place, bool),
        }
    return batches


def _check_rows_alike(experiment: Experiment, keys: Keys) -> None:
    """Raises ConfigError if a weighing rule starts clients with unequal rows, kept on the disk."""
    # `federate` starts the personal leaves and the memory of all clients alike.
    start = make_start(experiment, keys, rows=len(experiment.internal.domains))
    if not jax.eval_shape(start).weighing:
        return
    for leaf in jax.tree.leaves(jax.jit(lambda: start().weighing)()):
        if (leaf != leaf[:1]).any():
            raise ConfigError(
                "the weighing rule (config.weigh) begins with other memory for some clients than "
                "for others, which rows on the disk do not have: set population=device"
            )


def _load_weights(experiment: Experiment) -> tuple[Variables | None, tuple[str, ...]]:
    """Returns the variables from `start_from` or `pretrained` (None for others), and notes."""
    network, model = inspect.unwrap(experiment.model), experiment.plan.model
    start_from, weights = experiment.plan.start_from, experiment.plan.pretrained
    like = jax.eval_shape(lambda key: initial_variables(experiment, key), jax.random.key(0))
    if start_from:
        note = f"all clients start from the model of the run {start_from} (start_from)"
        return _starting_model(start_from, model, like), (note,)
    if not weights:
        known = (models.AlexNet, models.DenseNet, models.ResNet, models.YOLOv5)
        known += (models.ConvNeXt, models.ViT)
        why = f"{model} starts from random weights, because pretrained is empty"
        return None, (why,) * isinstance(network, known)
    variables, notes = pretrained.load_pretrained(weights, network, like)
    fixed = jax.tree.map(
        lambda leaf: None if isinstance(leaf, _Form) else jnp.asarray(leaf), variables
    )
    return fixed, notes


def _starting_model(start_from: str, model: str, like: Variables) -> Variables:
    """Returns the collections of `like` from the selected round of the run `config.start_from`.

    They are what an unseen client would receive: the shared leaves, and the mean of the personal
    leaves with the last round's weights. The clients' memory, and what the other method trained in
    addition to the model, are left out.
    """
    what = f"config.start_from={brief(start_from)}"
    try:
        tree = checkpoint.all_arrays(_checkpoint_of(Path(start_from).expanduser()))
        tree = tree.get("state", tree)  # a population has its rows in other files
        count = len(tree["weights"])
        personal = jax.tree.map(lambda leaf: jnp.asarray(leaf[:count]), tree["personal"])
        found = join(tree["shared"], weighted_mean(personal, tree["weights"]))
        found = filled(found, tree.get("frozen") or ())
    except UserError as error:
        raise ConfigError(f"{what}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} holds no state of a federation ({error}): give the workdir of a finished run"
        ) from error
    found = {name: found.get(name) for name in like}
    leaves = (jax.tree_util.tree_leaves_with_path(tree) for tree in (found, like))
    theirs, ours = ({"/".join(path_names(p)): leaf.shape for p, leaf in one} for one in leaves)
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            there, here = (of.get(name, "nothing") for of in (theirs, ours))
            raise ConfigError(
                f"{what} holds another model than config.model={brief(model)} with these classes: "
                f"{name} is {there} there and {here} here; give the same model and classes, or "
                "another run"
            )
    return jax.tree.map(lambda leaf, form: jnp.asarray(leaf, form.dtype), found, like)


def starting_record(start_from: str) -> Record:
    """Returns the entry of config.json for the start, {"start_from": {"round", "sha256"}}, or {}.

    Raises:
      ConfigError: `start_from` is not the workdir of a finished run.
    """
    if not start_from:
        return {}
    try:
        folder = _checkpoint_of(Path(start_from).expanduser())
        sums = read_regular(folder / checkpoint.CHECKSUMS)
    except (UserError, OSError, Refused) as error:
        raise ConfigError(f"config.start_from={brief(start_from)}: {error}") from error
    digest = hashlib.sha256(sums).hexdigest()
    return {"start_from": {"round": int(folder.name), "sha256": digest}}


def _checkpoint_of(workdir: Path) -> Path:
    """Returns the folder of a finished run's selected checkpoint, or of its latest one."""
    if not (workdir / "config.json").exists():
        raise ConfigError(f"{workdir} is not the workdir of a run: give one that has finished")
    read_json(workdir / "config.json", CLAIM)
    if not (workdir / "summary.json").exists():
        raise ConfigError(f"{workdir} holds no finished run: train it to its end first")
    for kind in ("selected", "latest"):
        names = (path.name for path in (workdir / "checkpoints" / kind).glob("*"))
        if rounds := [int(name) for name in names if name.isdecimal()]:
            return workdir / "checkpoints" / kind / str(max(rounds))
    raise ConfigError("it holds no checkpoint: give the workdir of a run that has one")


def data_hash(experiment: Experiment) -> str:
    """Returns the SHA-256 of the data split, unseen clients included, and of the trace if any."""
    domains = experiment.internal.domains + experiment.unseen
    data, trace = fingerprint(experiment.internal._replace(domains=domains)), b""
    if experiment.participation.trace is not None:
        trace = experiment.participation.trace.tobytes()
    return hashlib.sha256(data.encode() + trace).hexdigest() if trace else data


def partition_table(
    experiment: Experiment, state: FederatedState | Held, modules: bool = True
) -> str:
    """Returns a table of shared, personal and frozen leaves, with counts and bytes of one client.

    Args:
      experiment: the run's.
      state: before the next round.
      modules: whether the table has a line for each module, or only sums.
    """
    own = jax.tree.map(lambda leaf: _Form(leaf.shape[1:], leaf.dtype), state.personal)
    variables = join(state.shared, own)
    mask = jax.tree.map(lambda leaf, ours: ours is not None, variables, state.shared)
    plan = experiment.plan
    return f"{plan.method} on {plan.model}, {num_clients(state):,} clients\n" + (
        describe(variables, mask, modules, state.frozen)
    )
