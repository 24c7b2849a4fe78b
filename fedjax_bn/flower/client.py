"""The ClientApp: it presents its client, trains a round, and tests its own model.

Flower runs every task in a fresh process: what a client keeps is in its folder (`site.save_own`),
and compiled programs are in JAX's cache (`config.compilation_cache`, or JAX_COMPILATION_CACHE_DIR).
"""

import json
from functools import lru_cache
from logging import INFO
from pathlib import Path

import jax
import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from fedjax_bn.aggregation import ServerState
from fedjax_bn.arguments.text import brief, file_name
from fedjax_bn.engine.named_arrays import from_named, names_of, to_named
from fedjax_bn.federation import Broadcast, FederatedState, Own, broadcast_of, own_of
from fedjax_bn.flower.records import (
    Answer,
    Hello,
    Order,
    arrays_in,
    packed,
    record_in,
    recorded,
)
from fedjax_bn.flower.settings import Node, config_of, node_of
from fedjax_bn.flower.site import Site, load_own, open_site, save_own
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.evaluation.evaluate import Evaluate, internal_evaluator
from fedjax_bn.run.experiment.method import is_told
from fedjax_bn.run.experiment.start import check_shapes, partition_table
from fedjax_bn.run.files.ownership import owned

_Names = tuple[str, str, str, Node, int]  # source, changes, folder, node, clients of a site


def client_app(folder: str | Path = ".") -> ClientApp:
    """Returns a ClientApp of the method that the run config's `config` names; see `settings`.

    A task of it fails with a ConfigError (a key, the data, or what the server asks for does not
    suit), a WorkdirError (its own part is lost, or its folder cannot be written) or a ValueError
    (the server's message is another method's); the server names the client and continues without
    it.

    Args:
      folder: of the app, where the config file is looked for first.
    """
    app, folder = ClientApp(), str(folder)

    def names(message: Message, context: Context) -> _Names:
        # Of the run config only what determines the training.
        source, changes = (str(context.run_config.get(key, "")) for key in ("config", "changes"))
        clients = record_in(message.content, Order).population
        return source, changes, folder, node_of(context.node_config), clients

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        return _hello(names(message, context), message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _train(names(message, context), message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _evaluate(names(message, context), message)

    return app


@lru_cache
def _site(source: str, changes: str, folder: str, node: Node, clients: int) -> Site:
    """Made, and compiled, once for a configuration while the process lives."""
    return open_site(config_of(source, changes, folder), node, clients)


@lru_cache
def _evaluator(names: _Names) -> Evaluate:
    site = _site(*names)
    return internal_evaluator(site.config, site.experiment)


def _hello(names: _Names, message: Message) -> Message:
    """The client's name, the form of its samples, and their number, if it reports it."""
    site, order = _site(*names), record_in(message.content, Order)
    config, node = site.config, site.node
    try:  # traces the client's round and the server's step, before a client joins
        check_shapes(site.experiment, site.start)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if is_told(config) and not node.reports("losses"):
        raise ConfigError(
            f"config.weigh={brief(config.weigh)} sends this client's validation losses, which "
            f"report={brief(node.report)} of its node config keeps to itself: add losses to "
            "report, or set config.weigh=by_size or uniform"
        )
    weights = jax.ShapeDtypeStruct((order.population,), site.like.weights.dtype)
    log(INFO, partition_table(site.experiment, site.like._replace(weights=weights)))
    log(INFO, _serving_note(site, order))
    size = len(site.domain.train.images) if node.reports("sizes") else 0
    losses, scores = (node.reports(what) for what in ("losses", "accuracies"))
    about = Hello(node.name, size, losses, scores, json.dumps(site.form))
    return Message(content=packed(_answer(site, order), hello=about), reply_to=message)


def _serving_note(site: Site, order: Order) -> str:
    """Which personal leaves leave this client; raises ConfigError where it does not send them."""
    names = names_of({"personal": site.like.personal})
    if not order.serve_unseen or not names:
        return "no personal leaf leaves this client"
    if not site.node.serve_unseen:
        raise ConfigError(
            f"the server asks for the personal leaves of client {site.node.client} "
            f"({', '.join(names[:3])}, ...), to serve unseen clients with their mean, but this "
            "client does not send them: set serve-unseen=true in its node config, or "
            "serve-unseen=false in the run config"
        )
    return f"serve-unseen: these personal leaves leave this client: {', '.join(names)}"


def _train(names: _Names, message: Message) -> Message:
    """Its part of a round: what it keeps goes to its folder, what it sends into the reply."""
    site, order = _site(*names), record_in(message.content, Order)
    _serving_note(site, order)
    broadcast = _broadcast_in(message, site)
    place = _place(site, order)
    with owned(place):
        begun = _own_at(site, order, place)
        own, upload = jax.device_get(site.train(order, broadcast, begun))
        save_own(place, int(broadcast.round) + 1, own, order.begin)
    if not site.node.reports("losses"):
        hidden = {name: np.full_like(getattr(upload, name), np.nan) for name in ("loss", "risk")}
        upload = upload._replace(**hidden)
    sent = to_named(upload)
    if order.serve_unseen:
        sent |= to_named({"personal": own.personal})
    return Message(content=packed(_answer(site, order), recorded(sent)), reply_to=message)


def _evaluate(names: _Names, message: Message) -> Message:
    """The score of its own model, with what the server broadcasts, on its own samples."""
    site, order = _site(*names), record_in(message.content, Order)
    if not site.node.reports("accuracies"):
        raise ConfigError(
            "this client does not report its accuracies, see report in its node config"
        )
    broadcast = _broadcast_in(message, site)
    place = _place(site, order)
    with owned(place):
        own = _own_at(site, order, place)
        personal, memory = jax.tree.map(lambda leaf: np.asarray(leaf)[None], tuple(own))
        # A federation of this client alone, as far as its model needs one.
        alone = FederatedState(
            round=broadcast.round,
            shared=broadcast.shared,
            server=ServerState(sent=broadcast.message),
            weights=np.ones(1, site.like.weights.dtype),
            weighing=(),
            personal=personal,
            memory=memory,
        )
        record = _evaluator(names)(alone)
    scores = {name: record[name]["mean"] for name in ("accuracy", "validation") if name in record}
    return Message(content=packed(_answer(site, order), scores=scores), reply_to=message)


def _broadcast_in(message: Message, site: Site) -> Broadcast:
    """What the server sends to all; ValueError where it is another method's or model's."""
    return from_named(arrays_in(message.content), jax.eval_shape(broadcast_of, site.like))


def _place(site: Site, order: Order) -> Path:
    """Where this client keeps its own part in this federation."""
    return Path(site.node.folder).expanduser() / file_name(order.federation)


def _own_at(site: Site, order: Order, place: Path) -> Own:
    """What this client begins with; raises WorkdirError where it is lost."""
    if not order.begin:
        return jax.device_get(own_of(site.start(), 0))
    rows = Own(site.like.personal, site.like.memory)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    return load_own(place, order.begin, like)


def _answer(site: Site, order: Order) -> Answer:
    return Answer(order.federation, site.config.method, site.node.client)
