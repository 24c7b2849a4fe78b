"""The ClientApp: it answers who it is, trains a round, and tests its own model.

Flower runs every task in a fresh process: what a client keeps lies in its folder (`own_part`), and
compiled programs in JAX's cache (`config.compilation_cache`, or JAX_COMPILATION_CACHE_DIR).
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

from fedjax_bn.federation import FederatedState, Own, Upload, broadcast_of
from fedjax_bn.flower import own_part
from fedjax_bn.flower.records import (
    Answer,
    Hello,
    Order,
    arrays_in,
    order_in,
    packed,
    with_hello,
    with_scores,
)
from fedjax_bn.flower.settings import Node, config_of, node_of
from fedjax_bn.flower.site import Site, first_own, open_site
from fedjax_bn.named_arrays import from_named, names_of, to_named
from fedjax_bn.names import file_name
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.evaluate import Evaluate, internal_evaluator
from fedjax_bn.run.ownership import owned
from fedjax_bn.run.start import partition_table


def client_app(folder: str | Path = ".") -> ClientApp:
    """A ClientApp of whatever method the run config's `config` names; see `settings` for all keys.

    Args:
      folder: of the app, where the config file is looked for first.
    """
    app, folder = ClientApp(), str(folder)

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        return _hello(_site_of(context, folder), message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _train(_site_of(context, folder), message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _evaluate(_site_of(context, folder), _evaluator_of(context, folder), message)

    return app


def _site_of(context: Context, folder: str) -> Site:
    return _site(*_names(context, folder))


def _evaluator_of(context: Context, folder: str) -> Evaluate:
    return _evaluator(*_names(context, folder))


def _names(context: Context, folder: str) -> tuple[str, str, str, Node]:
    """What a site is made from. Of the run config only what says what is trained."""
    run = context.run_config
    texts = (str(run.get(key, "")) for key in ("config", "changes"))
    return (*texts, folder, node_of(context.node_config))


@lru_cache
def _site(source: str, changes: str, folder: str, node: Node) -> Site:
    """Made, and compiled, once for a configuration while the process lives."""
    return open_site(config_of(source, changes, folder), node)


@lru_cache
def _evaluator(*names: object) -> Evaluate:
    site = _site(*names)
    return internal_evaluator(site.config, site.experiment)


def _hello(site: Site, message: Message) -> Message:
    """Who this client is, the form of its samples, and how many it has, if it says so."""
    order, node = order_in(message.content), site.node
    log(INFO, partition_table(site.config, jax.eval_shape(site.rows(order.population))))
    log(INFO, _serving_note(site, order))
    size = len(site.domain.train.images) if node.reports("sizes") else 0
    about = Hello(node.name, size, node.reports("accuracies"), json.dumps(site.form))
    return Message(content=with_hello(about, _answer(site, order)), reply_to=message)


def _serving_note(site: Site, order: Order) -> str:
    """Which personal leaves leave this client, where any do."""
    names = names_of({"personal": _form(site).personal})
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


def _train(site: Site, message: Message) -> Message:
    """Its part of a round: what it keeps goes to its folder, what it sends into the reply."""
    order = order_in(message.content)
    _serving_note(site, order)
    like = jax.eval_shape(broadcast_of, _form(site))
    broadcast = from_named(arrays_in(message.content), like)
    place = _place(site, order)
    with owned(place):
        own, upload = jax.device_get(site.train(order, broadcast, _own_at(site, order, place)))
        own_part.save(place, int(broadcast.round) + 1, own, order.begin)
    sent = to_named(_reported(upload, site.node))
    if order.serve_unseen:
        sent |= to_named({"personal": own.personal})
    return Message(content=packed(sent, _answer(site, order)), reply_to=message)


def _evaluate(site: Site, evaluate: Evaluate, message: Message) -> Message:
    """The score of its own model, with what the server broadcasts, on its own samples."""
    order = order_in(message.content)
    if not site.node.reports("accuracies"):
        raise ConfigError(
            "this client does not report its accuracies, see report in its node config"
        )
    state = site.start()
    broadcast = from_named(arrays_in(message.content), jax.eval_shape(broadcast_of, state))
    place = _place(site, order)
    with owned(place):
        own = _own_at(site, order, place)
    personal, memory = jax.tree.map(lambda leaf: np.asarray(leaf)[None], tuple(own))
    state = state._replace(shared=broadcast.shared, personal=personal, memory=memory)
    told = evaluate(state)
    scores = {name: told[name]["mean"] for name in ("accuracy", "validation") if name in told}
    return Message(content=with_scores(scores, _answer(site, order)), reply_to=message)


def _form(site: Site) -> FederatedState:
    """The form of the state of this client's federation, with one row."""
    return jax.eval_shape(site.start)


def _place(site: Site, order: Order) -> Path:
    """Where this client keeps what is its own in this federation."""
    return Path(site.node.folder).expanduser() / file_name(order.federation)


def _own_at(site: Site, order: Order, place: Path) -> Own:
    """What this client begins with; raises WorkdirError where it is lost."""
    if not order.begin:
        return first_own(site)
    form = _form(site)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), Own(form.personal, form.memory)
    )
    return own_part.load(place, order.begin, like)


def _reported(upload: Upload, node: Node) -> Upload:
    """The upload without the losses that this client keeps to itself."""
    if node.reports("losses"):
        return upload
    hidden = {name: np.full_like(getattr(upload, name), np.nan) for name in ("loss", "risk")}
    return upload._replace(**hidden)


def _answer(site: Site, order: Order) -> Answer:
    return Answer(order.federation, site.config.method, site.node.client)
