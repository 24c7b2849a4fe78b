"""Builds a client's side of a federation: its data, its round, and the files of its own part.

A client's own part, its personal leaves and the memory of its method, stays in its own folder:

    FOLDER/FEDERATION/own-00000007.npz     after round 7, named arrays, each with a checksum
    FOLDER/FEDERATION/frozen.npz           the frozen leaves, if there are any

Files are written atomically, so a kill at any moment leaves the previous file whole. The file with
which the client began its last round is kept too: if the server did not get or did not accept the
upload, the client begins with that file again.
"""

import io
import secrets
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import ConfigError, WorkdirError
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.label_trees import stored
from fedjax_bn.data.sampling import Draw, point_to, stack_clients, validation_batches
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.named_arrays import from_named, to_named
from fedjax_bn.federation import FederatedState, Own, Upload
from fedjax_bn.flower.messages import Order
from fedjax_bn.flower.settings import Node
from fedjax_bn.run.experiment.build import HOLD_OUT, Experiment, assemble, build
from fedjax_bn.run.experiment.method import what_validates
from fedjax_bn.run.experiment.start import prepare
from fedjax_bn.sharing import MEASURED, OWN, Variables, without
from fedjax_bn.state import Broadcast
from fedjax_bn.training.rounds import megabytes
from fedjax_bn.training.start import Keys
from fedjax_bn.training.workdir import write_atomically

_OWN = "own-{:08d}.npz"
_FROZEN = "frozen.npz"
PyTree = Any
_Train = Callable[[Order, Broadcast, Own], tuple[Own, Upload]]


class Site(NamedTuple):
    """A client's model, data and training.

    Attributes:
      config: the configuration, see `deployed`.
      experiment: the experiment of this configuration, with this client's domain alone.
      start: makes the common start, a state with the row of one client.
      like: the form of that state.
      node: the node config.
      train: `train(order, broadcast, own) -> (own, upload)`, the client's part of a round; compiled
        once for each population and longest of an order.
    """

    config: ConfigDict
    experiment: Experiment
    start: Callable[[], FederatedState]
    like: FederatedState
    node: Node
    train: _Train


def deployed(config: ConfigDict) -> ConfigDict:
    """Returns a copy of a configuration without the keys that only a simulation uses.

    Here one device trains one client, and the server decides which clients take part.
    """
    config = config.copy_and_resolve_references()
    config.mesh.clients, config.population, config.baselines = 1, "device", ()
    config.clients_per_round = config.eval_clients = 0
    config.participation.trace = ""
    return config


def adds_noise(config: ConfigDict, side: str) -> bool:
    """Returns whether a side, "client" or "server", adds noise that no one can repeat.

    The server and all clients have the run config, and with it `config.seed`. So the side that
    `config.privacy.at` names seeds its noise with random numbers of the operating system, which
    never leave it. If `config.privacy.seed` is set, the noise equals the simulation's and protects
    no one.
    """
    keys = config.privacy
    return bool(keys.clip and keys.noise and keys.at == side and keys.seed is None)


def sent_personal(personal: Variables) -> Variables:
    """Returns what a client sends of its personal leaves if it serves unseen clients.

    What it has measured of its own data stays: an unseen client measures its own. So does the model
    with which it predicts instead of the shared one.
    """
    return without(personal, MEASURED, OWN)


def _training_keys(config: ConfigDict, keys: Keys) -> Keys:
    """Returns the keys of one training of a client, with a fresh one if the client adds noise.

    If two trainings had the same noise, the difference of their uploads would cancel it.
    """
    if not adds_noise(config, "client"):
        return keys
    # A seed has 32 bits, too few for a secret; `fold_in` adds 32 more.
    key = jax.random.key(secrets.randbits(32))
    return keys._replace(method=jax.random.fold_in(key, secrets.randbits(32)))


def open_site(config: ConfigDict, node: Node, clients: int) -> Site:
    """Reads the client's data and builds its training; compiles nothing yet.

    Args:
      config: the run's configuration, from `settings.config_of`.
      node: the node config.
      clients: the number of all clients.

    Raises:
      ConfigError: the configuration or the client's data are wrong.
    """
    config = deployed(config)
    make = partial(_of_client, node)
    experiment, keys, start = prepare(config, make, traced=False, clients=clients)
    train = _trainer(config, experiment, keys, node)
    return Site(config, experiment, start, jax.eval_shape(start), node, train)


def _of_client(node: Node, config: ConfigDict) -> Experiment:
    """Returns the experiment of one client, whose domain is chosen from the data that are here."""
    reading = config.copy_and_resolve_references()
    reading.client_epochs = ()  # one number for each client, which would not fit the data here
    if node.data:
        reading.data.path, reading.target = node.data, ""
        if reading.data.domains:
            reading.data.domains = (node.domain,) if node.domain else ()
    dataset, place = build(reading).internal, node.client
    names = [domain.name for domain in dataset.domains]
    if node.data:
        if node.domain not in names and (node.domain or len(names) > 1):
            raise ConfigError(
                f"the node config's domain={brief(node.domain)} is not among those in {node.data}: "
                f"choose one of {', '.join(names)}"
            )
        place = names.index(node.domain) if node.domain else 0
    elif place >= len(names):
        raise ConfigError(
            f"the node config's client={place} is not among the {len(names)} clients of "
            f"{dataset.name}, which are numbered from 0: choose one, or give data=PATH"
        )
    client_data = dataset._replace(domains=(dataset.domains[place],))
    if what_validates(config) and client_data.domains[0].validation is None:
        raise ConfigError(
            f"{what_validates(config)} needs validation samples, but client {node.client} has "
            f"none: {HOLD_OUT}"
        )
    return assemble(config, client_data, ())


def _trainer(config: ConfigDict, experiment: Experiment, keys: Keys, node: Node) -> _Train:
    """Returns `train(order, broadcast, own) -> (own, upload)`, see `Site`.

    If the samples fit on the device (`data.device_megabytes`), a round is one program; otherwise
    the host gathers a round's batches.
    """
    domain, method, work = experiment.internal.domains[0], experiment.method, experiment.work
    split, number = domain.train, jnp.asarray(node.client, jnp.int32)
    size = {} if node.reports("sizes") else {"size": jnp.ones((), jnp.int32)}
    validation: Batches = {}
    if what_validates(config):
        batches = validation_batches([domain.validation], config.eval_batch_size)
        validation = {"validation": jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), batches)}

    def draw(order: Order, key: jax.Array, number: jax.Array, round: jax.Array) -> Draw:
        """Returns the samples [1, S, B] that the simulation draws for this client in a round.

        S is the number of this client's own steps: what others report cannot make it larger.
        """
        count = len(split.images)
        # The longest client matters only where it has fewer samples than the batch size.
        sampler = work.sampler(count, max(order.longest, count))
        sizes = jnp.asarray([count], jnp.int32)
        return sampler(sizes, number[None], count, jax.random.fold_in(key, round))

    def who(order: Order, number: jax.Array) -> Batches:
        return {"client": number, "population": jnp.asarray(order.population, jnp.int32)} | size

    fits = megabytes([split]) <= config.data.device_megabytes
    data = stack_clients([split]) if fits else ()
    drawn = jax.jit(draw, static_argnums=0)

    # The client's number and data are arguments, not constants: the clients of one machine then
    # share one program in the compilation cache.
    @partial(jax.jit, static_argnums=0)
    def resident(order: Order, broadcast: Broadcast, own: Own, client: Any, inputs: Any) -> Any:
        keys, data, validation = inputs
        batches = point_to(data, draw(order, keys.data, client, broadcast.round))
        batches = jax.tree.map(lambda leaf: leaf[0], batches) | validation | who(order, client)
        return method.client(broadcast, own, batches, keys.method)

    def train(order: Order, broadcast: Broadcast, own: Own) -> tuple[Own, Upload]:
        # The order is a static argument, so fields that do not change the program are blanked.
        order = Order("", "", 0, order.population, order.longest, False)
        fresh = _training_keys(config, keys)
        if fits:
            return resident(order, broadcast, own, number, (fresh, data, validation))
        draws = jax.device_get(drawn(order, keys.data, number, broadcast.round))
        valid = draws.valid[0]
        index = np.where(valid, draws.index[0], 0)  # the index of padding is out of range
        images = np.asarray(split.images[index.reshape(-1)])
        batches = {
            "image": images.reshape(*index.shape, *images.shape[1:]),
            "label": jax.tree.map(
                lambda leaf: np.asarray(leaf)[index].astype(stored(leaf)), split.labels
            ),
            "valid": valid,
            "size": np.int32(len(split.images)),
        }
        return method.client(
            broadcast, own, batches | validation | who(order, number), fresh.method
        )

    return train


def load_own(folder: Path, number: int, like: Own) -> Own:
    """Returns a client's own part after `number` rounds (at least 1) from a federation's folder.

    Raises:
      WorkdirError: the file is missing, damaged, or of another form than `like`.
    """
    return _load(folder / _OWN.format(number), number, like)


def keep_frozen(folder: Path, frozen: PyTree) -> None:
    """Writes the frozen leaves that came with a client's first round into a federation's folder.

    Raises:
      WorkdirError: the folder cannot be written to.
    """
    content = io.BytesIO()
    np.savez(content, **to_named(frozen))
    write_atomically(folder / _FROZEN, content.getvalue())


def load_frozen(folder: Path, number: int, like: PyTree) -> PyTree:
    """Returns what `keep_frozen` wrote; the errors are those of `load_own`."""
    return _load(folder / _FROZEN, number, like)


def _load(path: Path, number: int, like: PyTree) -> Any:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            return from_named(dict(arrays), like)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise WorkdirError(
            f"what this client kept after round {number} is not in {path} "
            f"({getattr(error, 'strerror', None) or error}): give back that folder as it was, or "
            "begin a new federation in another workdir of the server"
        ) from error


def save_own(folder: Path, number: int, own: Own, began: int) -> None:
    """Writes a client's own part after `number` rounds, and deletes parts before `began`.

    Args:
      folder: the folder of one federation.
      number: the number of finished rounds.
      own: the client's own part.
      began: the number of the part with which this round began; 0 for the common start.

    Raises:
      WorkdirError: the folder cannot be written to.
    """
    content = io.BytesIO()
    np.savez(content, **to_named(own))
    write_atomically(folder / _OWN.format(number), content.getvalue())
    for path in folder.glob(_OWN.replace("{:08d}", "*")):
        # Later parts stay, because a delayed task may end after the task of a later round.
        if path.name < _OWN.format(began):
            path.unlink(missing_ok=True)
