"""Holds what clients send: who they are, what they say of themselves, and their uploads.

A client's number is bound to the public key of its SuperNode, which Flower has verified. The
server's folder keeps bindings, names in records and the sizes by which clients are drawn:

    WORKDIR/clients.json    {"0": {"name": "hospital-a", "key": "SHA256:...", "size": 120}, ...}

The key is "", and the size is missing, until a client has presented itself with one.
"""

import base64
import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from logging import WARNING
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from flwr.app import Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import ConfigError, UserError, WorkdirError
from fedjax_bn.arguments.text import short
from fedjax_bn.data.domain import form_of
from fedjax_bn.data.labels import is_of_masks
from fedjax_bn.engine.images import impossible_samples
from fedjax_bn.engine.named_arrays import check_numbers, from_named, to_named
from fedjax_bn.flower import messages
from fedjax_bn.flower.handshake import difference, facts_of
from fedjax_bn.flower.messages import Answer, Hello, Order, Reply, record_in
from fedjax_bn.flower.settings import Run
from fedjax_bn.run.files.finished_run import dataset_of
from fedjax_bn.state import Upload
from fedjax_bn.training import workdir
from fedjax_bn.training.workdir import Record

PyTree = Any
_POLL = 2.0  # seconds between two searches for clients that are not connected yet
_AGAIN = 60.0  # seconds until a refused node is asked again, at least
_SHARE = 10  # nodes that never answer take a part of 1 / _SHARE of the time at most
_MOST_FORM = 2**20  # characters of a form of samples
_MOST_COUNT = 2**16  # of classes, three times as many as ImageNet-21k has, and of boxes
_MOST_REFUSED = 20  # refusals in the record of a round
_REASON = 500  # characters of a reason in logs and records
_MOST_TEXT = 2000  # characters of an error that a client sends
_MOST_LOSS = 1e6
_BLOCK = 2**14  # numbers of a leaf that `_norm` squares at once
_FILE = "clients.json"
_Result = TypeVar("_Result")


class _MisfitError(ValueError):
    """An answer of a client that is not as it presented itself: with other data, for example."""


class Members:
    """The clients that the server has met, by their numbers.

    Attributes:
      connected: client -> the current number of its node, and its `Hello`.
      sizes: the sizes that they reported last, also of clients that have gone.
      keys: the fingerprints of the keys to which their numbers are bound.
      refused: node, with the fingerprint of its key -> why it was refused since the last record.
      misfits: nodes that answered otherwise than they had presented themselves; `meet` asks again.
    """

    def __init__(self, grid: Grid, run: Run, place: Path) -> None:
        """Reads the file of a server's workdir; WorkdirError if it is damaged or lost."""
        self.grid, self.run, self._path = grid, run, place / _FILE
        self.connected: dict[int, tuple[int, Hello]] = {}
        self.refused: dict[str, str] = {}
        self.misfits: set[int] = set()
        # node that was refused or asked again -> when it may be asked, by `time.monotonic`
        self._again: dict[int, float] = {}
        content: Record = {}
        if self._path.exists() or workdir.rounds_recorded(place / "metrics.jsonl"):
            content = workdir.read_json(self._path)
        try:
            entries = {k: content[str(k)] for k in range(run.clients) if str(k) in content}
            self._names = {k: entry["name"] for k, entry in entries.items()}
            self.keys = {k: entry["key"] for k, entry in entries.items() if entry["key"]}
            self.sizes = {k: entry["size"] for k, entry in entries.items() if "size" in entry}
        except (KeyError, TypeError) as error:
            text = f"{self._path} lacks the name or key of a client ({error}): restore it"
            raise WorkdirError(text) from error
        self.keys |= run.listed_keys()

    def name(self, client: int) -> str:
        """Returns the name of a client in the records."""
        return self._names.get(client, f"client-{client}")

    def save(self) -> None:
        """Writes names, bindings and sizes of all clients; from now on the names stay."""
        self._names = {k: self.name(k) for k in range(self.run.clients)}
        content: Record = {}
        for k, name in self._names.items():
            content[str(k)] = {"name": name, "key": self.keys.get(k, "")}
            content[str(k)] |= {"size": self.sizes[k]} if k in self.sizes else {}
        if not self._path.exists() or workdir.read_json(self._path) != content:
            workdir.write_json(self._path, content)

    def gather(self, order: Order) -> None:
        """Waits for all clients or, after the time limit, for as many as a round needs."""
        run, start = self.run, time.monotonic()
        minimum = run.minimum or run.clients
        while True:
            self.meet(order)
            count, waited = len(self.connected), time.monotonic() - start
            if count == run.clients or (count >= minimum and waited > run.time_limit):
                return
            if waited > run.attempts * run.time_limit:
                present = f"{count} of {run.clients} clients are there"
                remedy = "start their SuperNodes, or see the log for why they are left out"
                raise UserError(f"{present}, fewer than minimum={minimum}: {remedy}")
            time.sleep(_POLL)

    def meet(self, order: Order) -> None:
        """Asks new nodes to present themselves, and forgets members whose node has gone.

        The log and `refused` name a node whose answer cannot be used, whose number is bound to
        another key, or whose client is there already. It is asked again after a minute or, if it
        did not answer, after ten times the time limit; a misfit once in ten times that limit.
        """
        prints = {node.node_id: _fingerprint(node.public_key) for node in self.grid.get_nodes()}
        self._again = {node: at for node, at in self._again.items() if at > time.monotonic()}
        misfits, self.misfits = self.misfits - self._again.keys(), set()
        if order.digest:  # who came before the server had its facts may have others
            misfits |= {n for n, hello in self.connected.values() if hello.digest != order.digest}
        present = prints.keys() - misfits
        self.connected = {k: x for k, x in self.connected.items() if x[0] in present}
        met_nodes = {node for node, _ in self.connected.values()}
        nodes = sorted(prints.keys() - met_nodes - self._again.keys())
        questions = {node: messages.packed(order) for node in nodes}
        kind, seconds = MessageType.QUERY, self.run.time_limit
        replies = messages.exchange(self.grid, questions, kind, seconds, lambda node, reply: reply)
        for node, reply in replies.items():
            # A misfit stays a member for so long, whatever it answers.
            pause = _SHARE * seconds if node in misfits else 0.0
            try:
                self._admit(node, prints[node], reply, order)
            except ValueError as error:
                reason = short(str(error), _REASON)
                log(WARNING, "node %s is left out: %s", node, reason)
                if len(self.refused) < _MOST_REFUSED:
                    self.refused[f"node {node} {prints[node]}".strip()] = reason
                pause = max(_AGAIN, 0 if reply else _SHARE * seconds)
            if pause:
                self._again[node] = time.monotonic() + pause
        self.connected = dict(sorted(self.connected.items()))

    def ask(
        self,
        order: Order,
        contents: Mapping[int, RecordDict],
        kind: str,
        read: Callable[[int, RecordDict], _Result],
        keep: Callable[[int, _Result], None],
    ) -> dict[int, str]:
        """Sends client -> content, and calls `keep(k, read(k, reply))` with one reply at a time.

        Returns client -> why its reply is not kept: `read` may raise ValueError.
        """
        clients, reasons = {self.connected[k][0]: k for k in contents}, {}

        def take(node: int, reply: Reply) -> None:
            k = clients[node]
            try:
                result = read(k, _content_of(reply, order, k))
            except ValueError as error:
                reasons[k] = str(error)
                if kind == MessageType.TRAIN and isinstance(error, _MisfitError):
                    self.misfits.add(node)
                return
            keep(k, result)

        by_node = {node: contents[k] for node, k in clients.items()}
        seconds, group = self.run.time_limit, str(order.round)
        messages.exchange(self.grid, by_node, kind, seconds, take, group)
        return reasons

    def _admit(self, node: int, key: str, reply: Reply, order: Order) -> None:
        """Makes a node that presents itself a member; raises ValueError if it cannot be."""
        client, hello = _presented(reply, order, self.run.size_bound)
        problem = "which is there already" if client in self.connected else ""
        if order.digest not in ("", hello.digest):
            problem = "whose facts have another hash than the server's"
        if self.run.client_keys != "any":
            clients_of_key = [k for k, bound in self.keys.items() if key and bound == key]
            if self.keys.get(client, key) != key or {*clients_of_key} - {client}:
                problem = (
                    f"which is bound to {self.keys.get(client)}, with {key or 'no key'}, which is "
                    f"bound to clients {clients_of_key}: see client-keys in the run config"
                )
        if problem:
            raise ValueError(f"it presents itself as client {client}, {problem}")
        self.connected[client], self.sizes[client] = (node, hello), hello.size
        if self.run.client_keys != "any" and key:
            self.keys[client] = key
        if client not in self._names:
            # Records have an entry for each name and one for "mean", so names must be unique.
            taken_names = {"mean", *self._names.values()}
            taken_names |= {f"client-{k}" for k in range(order.population) if k != client}
            name = short(hello.name[:200], 80) or f"client-{client}"
            while name in taken_names:
                name += f"-{client}"
            self._names[client] = name


def _fingerprint(key: bytes) -> str:
    """Returns the fingerprint of a public key in PEM, as `ssh-keygen -lf` shows it."""
    # It is "" for other bytes: nodes of Flower's simulation have random ones.
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    try:
        public_key = serialization.load_pem_public_key(key).public_bytes(*form)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _content_of(reply: Reply, order: Order, client: int | None) -> RecordDict:
    """Returns the content of a client's reply to an order; ValueError if it cannot be used."""
    # The client is None if it is still unknown.
    if not isinstance(reply, Message):
        text = f"its reply cannot be read: {reply!s:.{_MOST_TEXT}}"
        raise ValueError(text if reply else "it did not answer in time")
    if reply.has_error():
        reason = re.sub(r"^<class '[\w.]+'>:<'(.*)'>$", r"\1", reply.error.reason[:_MOST_TEXT])
        raise _MisfitError(f"it failed: {reason}")
    answer = record_in(reply.content, Answer)
    if answer.federation != order.federation or client not in (None, answer.client):
        raise _MisfitError("it answers for another federation or another client")
    if (answer.method, answer.round) != (order.method, order.round):
        said = f"it answers for {answer.method:.40} and round {answer.round}"
        raise ValueError(f"{said}, not for {order.method} and round {order.round}")
    return reply.content


def _presented(reply: Reply, order: Order, bound: int) -> tuple[int, Hello]:
    """Returns a client's number and its `Hello`; raises ValueError if they cannot be used."""
    content = _content_of(reply, order, None)
    client, hello = record_in(content, Answer).client, record_in(content, Hello)
    if not (0 <= client < order.population and 0 <= hello.size <= bound):
        said = f"it presents itself as client {client} with {hello.size} samples"
        bounds = f"clients={order.population} (numbered from 0) and size-bound={bound}"
        raise ValueError(f"{said}, but the run config has {bounds}")
    if not _is_form(hello.form):
        raise ValueError(f"no samples have the form that it gives for its own: {hello.form:.80}")
    return client, hello


def _is_form(text: str) -> bool:
    """Returns whether `form_of` writes this form, without names, of some samples."""
    names = {"dataset": "federation", "clients": ["client"]}
    try:
        form = json.loads(text) if len(text) <= _MOST_FORM else {}
        counts = (form["num_classes"], form.get("boxes", 1))
        if (
            impossible_samples(*(form[name] for name in ("shape", "dtype", "mean", "std")))
            or not all(type(count) is int and 0 < count <= _MOST_COUNT for count in counts)
            or not ("masks" not in form or is_of_masks(form["masks"], form["shape"]))
        ):
            return False
        written = form_of(dataset_of(form | names))
        if "classes" in form:
            written["classes"] = [*map(str, form["classes"])]
        # Texts are compared, because in Python 1, 1.0 and True are equal.
        return json.dumps(form | names, sort_keys=True) == json.dumps(written, sort_keys=True)
    except Exception:  # the client chooses the text, and with it the error
        return False


def form_of_most(members: Members, order: Order, config: ConfigDict) -> str:
    """Returns the form of samples that more clients state than any other, or ConfigError."""
    connected = members.connected
    forms = Counter(hello.form for _, hello in connected.values()).most_common(2)
    form, other = forms[0][0], forms[-1][0]
    if form != other and forms[0][1] == forms[1][1]:
        names = ", ".join(members.name(k) for k, (_, h) in connected.items() if h.form == other)
        facts, other_facts = (facts_of(config, json.loads(text)) for text in (form, other))
        # Asked again as if the first were the server's, so that the others' logs say it too.
        members.misfits |= {node for node, _ in connected.values()}
        members.meet(order._replace(facts=facts))
        fault = difference(other_facts, facts).replace("the server", "as many others")
        raise ConfigError(f"no form of samples is that of most clients; of {names}, {fault}")
    return form


def accept(
    arrays: Mapping[str, np.ndarray],
    forms: tuple[Upload, PyTree],
    shared: PyTree,
    client: int,
    population: int,
    hello: Hello,
    norm_bound: float,
) -> tuple[Upload, PyTree, float]:
    """Returns the upload and personal leaves that a client sent, and the norm of its update.

    Names, shapes and dtypes must be exactly those of the method, numbers finite, no running
    variance negative, losses at most 1e6 in absolute value, or NaN if it reports none, and the size
    1 if it reports none. What is not accepted is a ValueError.

    Args:
      forms: of the upload, and of the personal leaves that are sent too; () for none.
      shared: the shared leaves that were broadcast.
      client, population: the number of the client that was asked, and K.
      norm_bound: of the update y_k - x, of the message, and of the personal leaves.
    """
    try:
        trees = from_named(arrays, forms[0]._asdict() | {"personal": forms[1]})
    except ValueError as error:
        raise _MisfitError(str(error)) from error
    personal = trees.pop("personal")
    upload = Upload(**trees)
    if int(upload.client) != client or int(upload.size) != (hello.size or 1):
        said = f"it speaks for client {upload.client} with {upload.size} samples"
        expected = f"{client} with {hello.size or 1} as it presented itself"
        raise _MisfitError(f"{said}, not for {expected}")
    if int(upload.population) != population or not (upload.participates and upload.finite):
        raise ValueError("its update is not finite, of another federation, or sits out")
    parts = {"shared": upload.shared, "message": upload.message, "personal": personal}
    check_numbers(to_named(parts))
    norms = {"message": _norm(upload.message), "personal leaves": _norm(personal)}
    norms["update"] = _norm(upload.shared, shared)
    sizes = {f"norm of its {part}": (norm, norm_bound) for part, norm in norms.items()}
    for name in ("risk", "loss"):
        value = float(getattr(upload, name))
        if hello.losses == math.isnan(value):
            raise _MisfitError(f"it sends a {name} of {value:.4g}, and losses={hello.losses}")
        if hello.losses:
            sizes[name] = abs(value), _MOST_LOSS
    for name, (size, bound) in sizes.items():
        if not size <= bound:  # NaN is not
            raise ValueError(f"the {name}, {size:.4g}, is above {bound:g} (see norm-bound)")
    return upload, personal, norms["update"]


def _norm(tree: PyTree, start: PyTree = None) -> float:
    """Returns the Euclidean norm of all leaves, minus those of `start` if given, in float64."""
    leaves, total = jax.tree.leaves(tree), 0.0
    starts = [np.zeros(())] * len(leaves) if start is None else jax.tree.leaves(start)
    for leaf, less in zip(leaves, starts, strict=True):
        flat = np.ravel(leaf)
        less = np.broadcast_to(np.ravel(less), flat.shape)
        # Leaves have millions of numbers, and a block of them fits into the caches. `np.dot` is
        # slower: BLAS starts threads that spin, 3 CPU seconds for 57 MB.
        for begin in range(0, flat.size, _BLOCK):
            part = slice(begin, begin + _BLOCK)
            block = flat[part].astype(np.float64) - less[part].astype(np.float64)
            with np.errstate(over="ignore"):  # an infinite norm is above every bound
                total += float(np.square(block, out=block).sum())
    return math.sqrt(total)
