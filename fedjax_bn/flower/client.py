"""Makes the ClientApp, which presents its client, trains a round, and tests the client's model.

Flower runs every task in a fresh process. So a client keeps its own part in its folder
(`site.save_own`), and compiled programs in JAX's cache (`config.compilation_cache`, or
JAX_COMPILATION_CACHE_DIR).
"""

import json
from collections.abc import Callable
from functools import cache, lru_cache, partial
from logging import INFO
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from fedjax_bn.aggregation import ServerState
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import brief, file_name
from fedjax_bn.data.domain import form_of, scored_part
from fedjax_bn.engine.named_arrays import from_named, names_of, to_named
from fedjax_bn.federation import Broadcast, FederatedState, Own, broadcast_of, own_of
from fedjax_bn.flower.messages import (
    TESTED_ON_VALIDATION,
    Answer,
    Hello,
    Order,
    arrays_in,
    digest_of,
    packed,
    record_in,
    recorded,
)
from fedjax_bn.flower.settings import Node, config_of, node_of
from fedjax_bn.flower.site import (
    Site,
    keep_frozen,
    load_frozen,
    load_own,
    open_site,
    save_own,
    sent_personal,
)
from fedjax_bn.run.experiment.method import weighs_by_validation
from fedjax_bn.run.files.ownership import owned
from fedjax_bn.training.evaluation.evaluate import Evaluate, internal_evaluator
from fedjax_bn.training.start import check_shapes, partition_table


class _Task:
    """One message of the server to one client."""

    def __init__(self, folder: str, message: Message, context: Context) -> None:
        # Only these keys of the run config change the training, so `_opened` is cached by them.
        source, changes = (str(context.run_config.get(key, "")) for key in ("config", "changes"))
        self.order, self.content = record_in(message.content, Order), message.content
        node = node_of(context.node_config)
        self.site, self.evaluator = _opened(source, changes, folder, node, self.order.population)
        # The folder of the client's own part, a different one for each federation.
        self.place = Path(node.folder).expanduser() / file_name(self.order.federation)

    def broadcast(self) -> Broadcast:
        """Returns the server's broadcast; raises ValueError if another method sent it."""
        arrays = {k: x for k, x in arrays_in(self.content).items() if not _is_frozen(k)}
        return from_named(arrays, jax.eval_shape(broadcast_of, self.site.like))

    def own(self) -> Own:
        """Returns the client's own part before the round, with the frozen leaves.

        Raises:
          WorkdirError: a file of it is lost.
          ValueError: the frozen leaves are not those of the server.
        """
        frozen = self._frozen()
        if not self.order.begin:
            own = jax.device_get(own_of(self.site.start(), 0))
        else:
            like = jax.eval_shape(lambda state: own_of(state, 0), self.site.like)
            own = load_own(self.place, self.order.begin, like._replace(frozen=()))
        return own._replace(frozen=frozen)

    def _frozen(self) -> Any:
        """Returns the frozen leaves, of which the server sends the hash; writes them once."""
        begin, like = self.order.begin, {"frozen": self.site.like.frozen}
        if not jax.tree.leaves(like) and not self.order.frozen:
            return ()
        if begin:
            leaves = load_frozen(self.place, begin, like)
        else:
            sent = {k: x for k, x in arrays_in(self.content).items() if _is_frozen(k)}
            leaves = from_named(sent, like)
        if digest_of(to_named(leaves)) != self.order.frozen:
            raise ValueError(
                "the frozen leaves have another hash than the server gives: use the same run "
                "config on both sides, and a new folder for the client, or a new workdir"
            )
        if not begin:
            keep_frozen(self.place, leaves)
        return leaves["frozen"]


def _is_frozen(name: str) -> bool:
    return name.startswith("frozen/")


def client_app(folder: str | Path = ".") -> ClientApp:
    """Returns a ClientApp of the method that the run config's `config` names; see `settings`.

    A task fails with a ConfigError (a key, the data, or the server's request does not suit), a
    WorkdirError (the client's own part is lost, or its folder cannot be written) or a ValueError
    (the server's message is from another method). The server logs which client failed and
    continues without it.

    Args:
      folder: the app's folder, in which the config file is looked for first.
    """
    app = ClientApp()

    def answering(answer: Callable[[_Task], dict[str, Any]]) -> Callable:
        def handle(message: Message, context: Context) -> Message:
            task = _Task(str(folder), message, context)
            content, site = answer(task), task.site
            order, method = task.order, site.config.method
            header = Answer(order.federation, method, site.node.client, order.round)
            return Message(content=packed(header, **content), reply_to=message)

        return handle

    app.query()(answering(_hello))
    app.train()(answering(_train))
    app.evaluate()(answering(_evaluate))
    return app


@lru_cache
def _opened(
    source: str, changes: str, folder: str, node: Node, clients: int
) -> tuple[Site, Callable[[], Evaluate]]:
    """Returns a client's site and a maker of its evaluator, each made once in a process."""
    site = open_site(config_of(source, changes, folder), node, clients)
    # The evaluator reads the test samples, so it is made at the first evaluation.
    return site, cache(partial(internal_evaluator, site.experiment))


def _hello(task: _Task) -> dict[str, Any]:
    """Returns how the client presents itself: name, form of samples, and what it reports."""
    site, node, config = task.site, task.site.node, task.site.config
    try:  # traces the client's round and the server's step, so that errors appear before round 1
        check_shapes(site.experiment, site.start, task.order.population)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if weighs_by_validation(config) and not node.reports("losses"):
        raise ConfigError(
            f"config.weigh={brief(config.weigh)} sends this client's validation losses, which "
            f"report={brief(node.report)} of its node config keeps to itself: add losses to "
            "report, or set config.weigh=by_size or uniform"
        )
    weights = jax.ShapeDtypeStruct((task.order.population,), site.like.weights.dtype)
    log(INFO, partition_table(site.experiment, site.like._replace(weights=weights)))
    log(INFO, _serving_note(task))
    internal = site.experiment.internal
    size = len(internal.domains[0].train.images) if node.reports("sizes") else 0
    losses, scores = (node.reports(kind) for kind in ("losses", "accuracies"))
    form = form_of(internal)
    del form["dataset"], form["clients"]  # names stay here; the server compares forms for equality
    return {"hello": Hello(node.name, size, losses, scores, json.dumps(form))}


def _serving_note(task: _Task) -> str:
    """Returns a note on the personal leaves that the client sends.

    Raises:
      ConfigError: the server asks for personal leaves, and this client does not send them.
    """
    names = names_of({"personal": sent_personal(task.site.like.personal)})
    if not task.order.serve_unseen or not names:
        return "no personal leaf leaves this client"
    if not task.site.node.serve_unseen:
        raise ConfigError(
            f"the server asks for the personal leaves of client {task.site.node.client} "
            f"({', '.join(names[:3])}, ...), to serve unseen clients with their mean, but this "
            "client does not send them: set serve-unseen=true in its node config, or "
            "serve-unseen=false in the run config"
        )
    return f"serve-unseen: these personal leaves leave this client: {', '.join(names)}"


def _train(task: _Task) -> dict[str, Any]:
    """Trains a round, writes the client's own part to its folder, and returns the upload."""
    _serving_note(task)
    site, order, broadcast = task.site, task.order, task.broadcast()
    with owned(task.place):  # a task of an earlier round may still be running
        personal_part, upload = jax.device_get(site.train(order, broadcast, task.own()))
        saved_part = personal_part._replace(frozen=())
        save_own(task.place, int(broadcast.round) + 1, saved_part, order.begin)
    if not site.node.reports("losses"):
        # NaN instead of no leaf, because the server requires the exact form of an upload.
        hidden = {name: np.full_like(getattr(upload, name), np.nan) for name in ("loss", "risk")}
        upload = upload._replace(**hidden)
    sent = to_named(upload)
    if order.serve_unseen:
        sent |= to_named({"personal": sent_personal(personal_part.personal)})
    return {"arrays": recorded(sent)}


def _evaluate(task: _Task) -> dict[str, Any]:
    """Returns the scores of the client's model (broadcast and own part) on its own samples."""
    site, broadcast = task.site, task.broadcast()
    if not site.node.reports("accuracies"):
        raise ConfigError(
            "this client does not report its accuracies, see report in its node config"
        )
    with owned(task.place):
        personal_part = task.own()
    personal, memory = jax.tree.map(lambda leaf: np.asarray(leaf)[None], personal_part[:2])
    # The evaluator takes a state, so this one holds the client alone, with K = 1.
    alone = FederatedState(
        round=broadcast.round,
        shared=broadcast.shared,
        server=ServerState(sent=broadcast.message),
        weights=np.ones(1, site.like.weights.dtype),
        weighing=(),
        personal=personal,
        memory=memory,
        frozen=personal_part.frozen,
    )
    record = task.evaluator()(alone)
    scores = {k: record[k]["mean"] for k in ("accuracy", "validation") if k in record}
    # Percent of the tested samples that also validate: all or none.
    validating = scored_part(task.site.experiment.internal.domains) == "validation"
    return {"scores": scores | {TESTED_ON_VALIDATION: 100.0 * validating}}
