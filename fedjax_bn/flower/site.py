"""A client's side of a federation: its own data, and its round as the method's `client`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.arguments.text import brief
from fedjax_bn.data.domain import Dataset, Domain, Split, form_of
from fedjax_bn.data.label_trees import stored
from fedjax_bn.data.sampling import Draw, point_to, stack_clients, validation_batches
from fedjax_bn.engine.batches import Batches
from fedjax_bn.federation import FederatedState, Own, Upload, own_of
from fedjax_bn.flower import noise
from fedjax_bn.flower.records import Order
from fedjax_bn.flower.settings import Node
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.build import HOLD_OUT, Experiment, assemble, build, sampler_of
from fedjax_bn.run.experiment.method import what_validates
from fedjax_bn.run.experiment.shapes import check_shapes
from fedjax_bn.run.experiment.start import Keys, prepare
from fedjax_bn.run.training.stream import megabytes
from fedjax_bn.state import Broadcast

PyTree = Any


class Site(NamedTuple):
    """What one client trains, and on what.

    Attributes:
      config: the configuration, see `deployed`.
      experiment: what it names, with this client's domain alone.
      keys: the run's random keys.
      start: makes the common start, a state with the row of one client.
      like: the form of that state.
      node: the node config.
      form: of its samples, as `domain.form_of` makes it.
      train: `train(order, broadcast, own) -> (own, upload)`, its part of a round; compiled once
        for each form of an order.
    """

    config: ConfigDict
    experiment: Experiment
    keys: Keys
    start: Callable[[], FederatedState]
    like: FederatedState
    node: Node
    form: dict[str, Any]
    train: Callable[[Order, Broadcast, Own], tuple[Own, Upload]]

    @property
    def domain(self) -> Domain:
        """Its own samples."""
        return self.experiment.internal.domains[0]


def deployed(config: ConfigDict) -> ConfigDict:
    """The configuration without what only a simulation of all clients has.

    One device trains; who takes part, and who is tested, the server says.

    Args:
      config: of a run; it stays as it is.
    """
    config = config.copy_and_resolve_references()
    config.mesh, config.population, config.baselines = "1", "device", ()
    config.clients_per_round = config.eval_clients = 0
    config.participation.trace = ""
    return config


def open_site(config: ConfigDict, node: Node, clients: int) -> Site:
    """Reads the client's data and builds what trains on them; nothing is compiled yet.

    Every task of a client begins with it: whether a round works, `check_site` traces once.

    Args:
      config: of the run, as `settings.config_of` makes it.
      node: the node config.
      clients: how many the federation has.

    Raises:
      ConfigError: the configuration, or the data of this client, do not suit.
    """
    config = deployed(config)
    make = partial(_of_client, node)
    experiment, keys, start = prepare(config, make, traced=False, clients=clients)
    train = _trainer(config, experiment, keys, node)
    form = {
        k: v for k, v in form_of(experiment.internal).items() if k not in ("dataset", "clients")
    }
    return Site(config, experiment, keys, start, jax.eval_shape(start), node, form, train)


def check_site(site: Site) -> None:
    """Traces the client's round and the server's step, before a client joins.

    Raises:
      ConfigError: model, method and data do not suit each other, or do not fit in memory.
    """
    try:
        check_shapes(site.config, site.experiment, site.start)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def first_own(site: Site) -> Own:
    """What a client has of its own before its first round, NumPy arrays without the axis K."""
    return jax.device_get(own_of(site.start(), 0))


def _of_client(node: Node, config: ConfigDict) -> Experiment:
    """The experiment of one client."""
    found = build(_reading(config, node)).internal
    mine = found._replace(domains=(_domain_of(found, node),))
    if what_validates(config) and mine.domains[0].validation is None:
        raise ConfigError(
            f"{what_validates(config)} needs validation samples, but client {node.client} has "
            f"none: {HOLD_OUT}"
        )
    return assemble(config, mine, ())


def _reading(config: ConfigDict, node: Node) -> ConfigDict:
    """The configuration with which the data that are here are read."""
    config = config.copy_and_resolve_references()
    config.client_epochs = ()  # of all clients, who are elsewhere
    if node.data:
        config.data.path, config.target = node.data, ""
        if config.data.domains:
            config.data.domains = (node.domain,) if node.domain else ()
    return config


def _domain_of(found: Dataset, node: Node) -> Domain:
    """The client's domain among those that are here."""
    names = [domain.name for domain in found.domains]
    if not node.data:
        if node.client >= len(names):
            raise ConfigError(
                f"the node config's client={node.client} is none of the {len(names)} clients of "
                f"{found.name}, which are numbered from 0: choose one, or give data=PATH"
            )
        return found.domains[node.client]
    if node.domain not in names and (node.domain or len(names) > 1):
        raise ConfigError(
            f"the node config's domain={brief(node.domain)} is none of those in {node.data}: "
            f"choose one of {', '.join(names)}"
        )
    return found.domains[names.index(node.domain) if node.domain else 0]


def _trainer(
    config: ConfigDict, experiment: Experiment, keys: Keys, node: Node
) -> Callable[[Order, Broadcast, Own], tuple[Own, Upload]]:
    """Returns `train(order, broadcast, own) -> (own, upload)`, which compiles once an order's form.

    Where the samples fit on the device (`data.device_megabytes`) it is one program; else the host
    gathers a round's batches.
    """
    domain, method = experiment.internal.domains[0], experiment.method
    split, kept = domain.train, _kept(config, domain)
    number = jnp.asarray(node.client, jnp.int32)
    told = {} if node.reports("sizes") else {"size": jnp.ones((), jnp.int32)}

    def who(order: Order, number: jax.Array) -> Batches:
        return {"client": number, "population": jnp.asarray(order.population, jnp.int32)} | told

    draw = partial(_draw, config, len(split.images))
    if megabytes([split]) <= config.data.device_megabytes:
        data = stack_clients([split])

        # What differs between clients is an argument: those of one machine share compiled programs.
        @partial(jax.jit, static_argnums=0)
        def resident(
            order: Order, broadcast: Broadcast, own: Own, number: jax.Array, given: Any
        ) -> Any:
            keys, data, kept = given
            batches = point_to(data, draw(keys.data, number, order, broadcast.round))
            batches = jax.tree.map(lambda leaf: leaf[0], batches) | kept | who(order, number)
            return method.client(broadcast, own, batches, keys.method)

        return lambda order, broadcast, own: resident(
            _of_form(order), broadcast, own, number, (noise.of_client(config, keys), data, kept)
        )

    drawn = jax.jit(draw, static_argnums=2)

    def gathered(order: Order, broadcast: Broadcast, own: Own) -> tuple[Own, Upload]:
        order = _of_form(order)
        batches = _gather(split, jax.device_get(drawn(keys.data, number, order, broadcast.round)))
        key = noise.of_client(config, keys).method
        return method.client(broadcast, own, batches | kept | who(order, number), key)

    return gathered


def _of_form(order: Order) -> Order:
    """Of an order what a compiled round depends on."""
    return order._replace(federation="", method="", begin=0, serve_unseen=False)


def _draw(
    config: ConfigDict, size: int, key: jax.Array, number: jax.Array, order: Order, round: jax.Array
) -> Draw:
    """The samples [1, S, B] of a client's round: those that the simulation draws for it."""
    longest = max(order.longest, size)
    sampler = sampler_of(config, min(order.smallest or size, size), longest)
    sizes = jnp.asarray([size], jnp.int32)
    draw = sampler(sizes, number[None], longest, jax.random.fold_in(key, round))
    if config.local_steps or config.local_epochs > 1 or config.client_epochs:
        return draw
    # Of one epoch the steps behind a smaller client's own are empty, and change nothing.
    steps = -(-size // min(config.batch_size, longest))
    return jax.tree.map(lambda leaf: leaf[:, :steps], draw)


def _kept(config: ConfigDict, domain: Domain) -> Batches:
    """{"validation": the client's samples}, where training needs them; else {}."""
    if not what_validates(config):
        return {}
    batches = validation_batches([domain.validation], config.eval_batch_size)
    return {"validation": jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), batches)}


def _gather(split: Split, draw: Draw) -> Batches:
    """A round's batches on the host, [S, B, ...]."""
    index, valid = np.where(draw.valid[0], draw.index[0], 0), draw.valid[0]
    images = np.asarray(split.images[index.reshape(-1)])

    def chosen(leaf: np.ndarray) -> np.ndarray:
        return np.asarray(leaf)[index].astype(stored(leaf))

    return {
        "image": images.reshape(*index.shape, *images.shape[1:]),
        "label": jax.tree.map(chosen, split.labels),
        "valid": valid,
        "size": np.int32(len(split.images)),
    }
