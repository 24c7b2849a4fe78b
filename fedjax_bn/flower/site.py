"""Builds a client's side of a federation, and makes the ClientApp.

What stays with the client is in its own folder, see `site_files`. Flower runs every task in a fresh
process; compiled programs are in JAX's cache (`config.compilation_cache`).
"""

import json
import secrets
from collections.abc import Callable
from functools import cache, lru_cache, partial
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from ml_collections import ConfigDict

from fedjax_bn.aggregation import ServerState
from fedjax_bn.arguments.errors import ConfigError, UserError, WorkdirError
from fedjax_bn.arguments.text import brief, file_name
from fedjax_bn.client import Begun
from fedjax_bn.data.domain import form_of, scored_part
from fedjax_bn.data.sampling import Draw, point_to, stack_clients, validation_batches
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.named_arrays import from_named, names_of, to_named
from fedjax_bn.flower import messages, site_files
from fedjax_bn.flower.handshake import digest_of, facts_of, require_equal
from fedjax_bn.flower.messages import Answer, Hello, Order
from fedjax_bn.flower.settings import Node, adds_noise, config_of, deployed, node_of
from fedjax_bn.methods.selection import in_pieces
from fedjax_bn.run.config import flatten
from fedjax_bn.run.experiment.build import Experiment, assemble, build, prepare
from fedjax_bn.run.experiment.datasets import configured_clients, read_data
from fedjax_bn.run.experiment.method import weighs_by_validation, what_validates
from fedjax_bn.run.files.ownership import owned
from fedjax_bn.sharing import MEASURED, OWN, Variables, without
from fedjax_bn.state import Broadcast, FederatedState, Own, Upload, broadcast_of, own_of
from fedjax_bn.training.evaluation.answers import Keep, predictions_of
from fedjax_bn.training.evaluation.evaluate import Evaluate, batch_accuracy, internal_evaluator
from fedjax_bn.training.rounds import megabytes, stream_rounds
from fedjax_bn.training.start import Keys, check_shapes, partition_table
from fedjax_bn.training.workdir import describe_machine, write_atomically

_LOSSES = ("loss", "risk")
_FROZEN = "frozen.npz"
PyTree = Any
_Train = Callable[[Order, Broadcast, Own, Path], tuple[Own, Upload]]


class _Site(NamedTuple):
    """A client's model, data and training."""

    config: ConfigDict  # see `deployed`
    experiment: Experiment  # of this configuration, with this client's domain alone
    start: Callable[[], FederatedState]  # makes the common start, with the row of one client
    like: FederatedState  # the form of that state
    facts: str  # see `handshake`
    node: Node
    train: _Train  # the client's part of a round; compiled once for each longest of an order
    # makes the evaluator at its first call, because it reads the test samples
    evaluator: Callable[[], Evaluate]


def sent_personal(personal: Variables) -> Variables:
    """Returns what a client sends of its personal leaves if it serves unseen clients.

    What it has measured of its own data stays, as does the model with which it alone predicts.
    """
    return without(personal, MEASURED, OWN)


def open_site(config: ConfigDict, node: Node, clients: int) -> _Site:
    """Reads the client's data and builds its training, one of `clients`; compiles nothing yet.

    Raises ConfigError if the configuration (`settings.config_of`) or the data are wrong.
    """
    config = deployed(config)
    make = partial(_of_client, node)
    experiment, keys, start = prepare(config, make, traced=False, clients=clients)
    train = _trainer(config, experiment, keys, node)
    evaluator, like = cache(partial(internal_evaluator, experiment)), jax.eval_shape(start)
    facts = facts_of(config, form_of(experiment.internal), like)
    return _Site(config, experiment, start, like, facts, node, train, evaluator)


def _reading(node: Node, config: ConfigDict) -> ConfigDict:
    """Returns a copy of the configuration that reads the data that are here."""
    reading = config.copy_and_resolve_references()
    reading.client_epochs = ()  # one number for each client, which would not fit the data here
    if node.data:
        reading.data.path, reading.target = node.data, ""
        if reading.data.domains:
            reading.data.domains = (node.domain,) if node.domain else ()
    return reading


def _of_client(node: Node, config: ConfigDict) -> Experiment:
    """Returns the experiment of one client, whose domain is chosen from the data that are here."""
    dataset = build(_reading(node, config)).internal
    key, choice, choices = "client", str(node.client), [*map(str, range(len(dataset.domains)))]
    if node.data:
        choices = [domain.name for domain in dataset.domains]
        # Data of one domain need no choice.
        only_domain = choices[0] if len(choices) == 1 else ""
        key, choice = "domain", node.domain or only_domain
    if choice not in choices:
        place = f"{node.data or dataset.name}, which has {', '.join(choices)}"
        raise ConfigError(f"the node config's {key}={getattr(node, key)!r} is not in {place}")
    internal, options = dataset._replace(domains=(dataset.domains[choices.index(choice)],)), {}
    if every := node.checkpoint_steps:
        if config.local_selection:
            steps = f"the node config's checkpoint-steps={every}"
            chosen = f"state that config.local_selection={config.local_selection} has chosen"
            raise ConfigError(f"{steps} stores no {chosen}: leave one of them out")
        options["train"] = in_pieces(every)
    return assemble(config, internal, (), **options)


def _trainer(config: ConfigDict, experiment: Experiment, keys: Keys, node: Node) -> _Train:
    """Returns `train`, see `_Site`."""
    # If the samples fit on the device (`data.device_megabytes`), a round is one program; otherwise
    # the host gathers a round's batches.
    domain, method, work = experiment.internal.domains[0], experiment.method, experiment.work
    split, count = domain.train, len(domain.train.images)
    about: Batches = {"client": jnp.asarray(node.client, jnp.int32)}
    if not node.reports("sizes"):
        about["size"] = jnp.ones((), jnp.int32)
    if what_validates(config):
        batches = validation_batches([domain.validation], config.eval_batch_size)
        about["validation"] = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), batches)

    @partial(jax.jit, static_argnums=0)
    def draw(longest: int, key: jax.Array, number: jax.Array, round: jax.Array) -> Draw:
        """Returns the samples [1, S, B] that the simulation draws for this client in a round."""
        # The longest client matters only where it has fewer samples than the batch size; S does not
        # depend on it, so what others report makes no round longer.
        sampler = work.sampler(count, longest)
        sizes = jnp.asarray([count], jnp.int32)
        return sampler(sizes, number[None], count, jax.random.fold_in(key, round))

    fits = megabytes([split]) <= config.data.device_megabytes
    data = stack_clients([split]) if fits else ()

    # The client's number and data are arguments, not constants: the clients of one machine then
    # share one program in the compilation cache.
    @partial(jax.jit, static_argnums=(0, 1))
    def resident(
        longest: int, program: Callable, sent: tuple[Broadcast, Own], data: Any, about: Batches,
        keys: Keys, *begun: Begun,
    ) -> Any:  # fmt: skip
        draws = draw(longest, keys.data, about["client"], sent[0].round)
        batches = jax.tree.map(lambda leaf: leaf[0], point_to(data, draws))
        return program(*sent, batches | about, keys.method, *begun)

    def train(order: Order, broadcast: Broadcast, own: Own, path: Path) -> tuple[Own, Upload]:
        longest, fresh = max(order.longest, count), keys
        extra = about | {"population": jnp.asarray(order.population, jnp.int32)}
        if adds_noise(config, "client"):
            # If two trainings had the same noise, the difference of their uploads would cancel it.
            # A seed has 32 bits, too few for a secret; `fold_in` adds 32 more.
            key = jax.random.key(secrets.randbits(32))
            fresh = keys._replace(method=jax.random.fold_in(key, secrets.randbits(32)))
        batches, rows = extra, data
        if not fits:
            draws = jax.device_get(draw(longest, keys.data, extra["client"], broadcast.round))
            round, only_client = int(broadcast.round), np.zeros(1, np.int32)
            at = round, round + 1, only_client
            rows = next(stream_rounds([split], lambda _: (only_client, draws), *at))
            batches = jax.tree.map(lambda leaf: leaf[0], rows) | extra

        def run(program: Callable, keys: Keys, *begun: Begun) -> Any:
            if fits:
                return resident(longest, program, (broadcast, own), data, extra, keys, *begun)
            return program(broadcast, own, batches, keys.method, *begun)

        if not (every := node.checkpoint_steps):
            return run(method.client, fresh)
        settings = [*flatten(config)], every, longest, describe_machine()
        digest = site_files.digest_of_round(settings, (broadcast, own, rows, extra))
        # Steps have the run's key, with which they can go on; only the upload has the secret one.
        begun = site_files.train_in_pieces(partial(run, method.train, keys), every, path, digest)
        return run(method.client, fresh, begun)

    return train


def client_app(folder: str | Path = ".") -> ClientApp:
    """Returns a ClientApp of the method that the run config's `config` names; see `settings`.

    `folder` is the app's, in which the config file is looked for first. A task fails with a
    WorkdirError if the client's own part is lost, or its folder cannot be written to, and with a
    ValueError if a key, the data or the server's message does not suit. The server logs which
    client failed and continues without it.
    """
    app = ClientApp()

    def answering(answer: Callable[["_Task"], dict[str, Any]]) -> Callable:
        def handle(message: Message, context: Context) -> Message:
            node = node_of(context.node_config)
            try:
                task = _Task(str(folder), message, context, node)
                content, order = answer(task), task.order
            except (UserError, ValueError) as error:
                fault = f"client {node.client} ({node.name or '-'}) cannot take part: {error}"
                log(ERROR, "%s", fault)  # Flower shows it behind a traceback
                kind = WorkdirError if isinstance(error, WorkdirError) else ConfigError
                raise kind(fault) from error
            header = Answer(order.federation, task.site.config.method, node.client, order.round)
            return Message(content=messages.packed(header, **content), reply_to=message)

        return handle

    app.query()(answering(_Task.hello))
    app.train()(answering(_Task.train))
    app.evaluate()(answering(_Task.evaluate))
    return app


@lru_cache
def _opened(source: str, changes: str, folder: str, node: Node, clients: int) -> _Site:
    """Returns a client's site, which is made once in a process."""
    return open_site(config_of(source, changes, folder), node, clients)


class _Task:
    """One message of the server to one client."""

    def __init__(self, folder: str, message: Message, context: Context, node: Node) -> None:
        # Only these keys of the run config change the training, so `_opened` is cached by them.
        source, changes = (str(context.run_config.get(key, "")) for key in ("config", "changes"))
        self.order, self.arrays = messages.record_in(message.content, Order), {}
        if message.metadata.message_type != MessageType.QUERY:
            self.arrays = messages.arrays_in(message.content)
        try:
            self.site = _opened(source, changes, folder, node, self.order.population)
        except ConfigError:
            # It may be that the network does not suit samples that differ from the server's.
            reading = _reading(node, deployed(config_of(source, changes, folder)))
            dataset, _ = configured_clients(read_data(reading), reading)
            require_equal(facts_of(reading, form_of(dataset)), self.order.facts)
            raise
        # The folder of the client's own part, a different one for each federation.
        self.place = Path(node.folder).expanduser() / file_name(self.order.federation)
        require_equal(self.site.facts, self.order.facts)
        self.digest = digest_of(self.site.facts)
        if self.order.digest not in ("", self.digest):
            raise ConfigError("its data or its config file were changed since it presented itself")

    def hello(self) -> dict[str, Any]:
        """Returns how the client presents itself: name, form of samples, and what it reports."""
        site, node, config = self.site, self.site.node, self.site.config
        # Traces the client's round and the server's step, so that errors appear before it.
        check_shapes(site.experiment, site.start, self.order.population)
        losses, scores = node.reports("losses"), node.reports("accuracies")
        if weighs_by_validation(config) and not losses:
            rule = f"config.weigh={brief(config.weigh)}"
            remedy = f"add losses to report={brief(node.report)} in its node config"
            raise ConfigError(f"{rule} sends this client's validation losses: {remedy}")
        weights = jax.ShapeDtypeStruct((self.order.population,), site.like.weights.dtype)
        log(INFO, partition_table(site.experiment, site.like._replace(weights=weights)))
        names = self._sent_names()
        log(INFO, "personal leaves that leave this client: %s", ", ".join(names) or "none")
        internal = site.experiment.internal
        size = len(internal.domains[0].train.images) if node.reports("sizes") else 0
        form = form_of(internal)
        del form["dataset"], form["clients"]  # names stay here; the server compares the rest
        return {"hello": Hello(node.name, size, losses, scores, json.dumps(form), self.digest)}

    def train(self) -> dict[str, Any]:
        """Trains a round, writes the client's own part to its folder, and returns the upload."""
        site, order, broadcast = self.site, self.order, self._broadcast()
        names = self._sent_names()
        with owned(self.place):  # a task of an earlier round may still be running
            begun = self.place / "begun.npz"
            part, upload = jax.device_get(site.train(order, broadcast, self._own(), begun))
            number = int(broadcast.round) + 1
            site_files.save_own(self.place, number, part._replace(frozen=()), order.begin)
            begun.unlink(missing_ok=True)
        if not site.node.reports("losses"):
            # NaN instead of no leaf, because the server requires the exact form of an upload.
            hidden = {loss: np.full_like(getattr(upload, loss), np.nan) for loss in _LOSSES}
            upload = upload._replace(**hidden)
        sent = to_named(upload)
        if names:
            sent |= to_named({"personal": sent_personal(part.personal)})
        return {"arrays": messages.recorded(sent)}

    def evaluate(self) -> dict[str, Any]:
        """Returns the scores of the client's model (broadcast and own part) on its own samples."""
        site, order, broadcast = self.site, self.order, self._broadcast()
        if not site.node.reports("accuracies"):
            raise ConfigError("this client reports no accuracies, see report in its node config")
        with owned(self.place):
            part = self._own()
        if not order.begin and jax.tree.leaves(part.personal):
            log(WARNING, "its personal leaves were never trained: the initial ones are tested")
        personal, memory = jax.tree.map(lambda leaf: np.asarray(leaf)[None], part[:2])
        own = {"personal": personal, "memory": memory, "frozen": part.frozen}
        weights, server = np.ones(1, site.like.weights.dtype), ServerState(sent=broadcast.message)
        # The evaluator takes a state, so this one holds the client alone, with K = 1.
        alone = FederatedState(broadcast.round, broadcast.shared, server, weights, (), **own)
        answers: Keep = {}
        record = site.evaluator()(alone, None, answers)
        if by_batches := batch_accuracy(site.experiment, alone):
            record[messages.BATCH] = by_batches
        if site.node.predictions:
            with owned(self.place):
                path = self.place / "predictions.csv"
                write_atomically(path, predictions_of(answers, "csv"))
                log(INFO, "round %s, case by case, in %s: it stays here", order.round, path)
        scores = {k: record[k]["mean"] for k in messages.SCORED if k in record}
        # Percent of the tested samples that also validate: all or none.
        validating = scored_part(site.experiment.internal.domains) == "validation"
        return {"scores": scores | {messages.TESTED_ON_VALIDATION: 100.0 * validating}}

    def _sent_names(self) -> list[str]:
        """Returns the names of the personal leaves that are sent; ConfigError if they stay."""
        names = names_of({"personal": sent_personal(self.site.like.personal)})
        if not self.order.serve_unseen or not names:
            return []
        if not self.site.node.serve_unseen:
            asked = f"the server asks client {self.site.node.client} for {names[0]}"
            remedy = "serve-unseen=true in its node config, or serve-unseen=false in the run config"
            raise ConfigError(f"{asked}, which stays: set {remedy}")
        return names

    def _broadcast(self) -> Broadcast:
        """Returns the server's broadcast; ValueError if another method sent it."""
        sent = {k: x for k, x in self.arrays.items() if not k.startswith("frozen/")}
        return from_named(sent, jax.eval_shape(broadcast_of, self.site.like))

    def _own(self) -> Own:
        """Returns the client's own part before the round, with the frozen leaves, sent once."""
        begin, path, like = self.order.begin, self.place / _FROZEN, self.site.like
        frozen = {"frozen": like.frozen}
        if begin:
            form = jax.eval_shape(lambda state: own_of(state, 0), like)
            part = site_files.load_own(self.place, begin, form._replace(frozen=()))
            frozen = site_files.load_arrays(path, frozen) if jax.tree.leaves(frozen) else frozen
        else:
            part = jax.device_get(own_of(self.site.start(), 0))
            sent = {name: x for name, x in self.arrays.items() if name.startswith("frozen/")}
            frozen = from_named(sent, frozen)
            if sent:
                site_files.save_arrays(path, frozen)
        return part._replace(**frozen)
