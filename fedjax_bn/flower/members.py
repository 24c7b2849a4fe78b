"""Holds what clients send: who they are, what they say of themselves, and their uploads.

A client's number is bound to the public key of its SuperNode, which Flower has verified. The
server's folder keeps the bindings, the clients' names in records and the sizes by which they are
drawn, so that all survive a restart and the client itself:

    WORKDIR/clients.json    {"0": {"name": "hospital-a", "key": "SHA256:...", "size": 120}, ...}

The key is "", and the size is missing, until a client has presented itself with one.
"""

import base64
import hashlib
import json
import math
import time
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
)
from flwr.app import MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.arguments.text import short
from fedjax_bn.data.domain import form_of
from fedjax_bn.data.labels import is_of_masks
from fedjax_bn.engine.images import impossible_samples
from fedjax_bn.engine.named_arrays import check_numbers, from_named, to_named
from fedjax_bn.flower import messages
from fedjax_bn.flower.messages import Hello, MisfitError, Order, Reply, content_of
from fedjax_bn.flower.settings import Run
from fedjax_bn.run.files.finished_run import dataset_of
from fedjax_bn.state import Upload
from fedjax_bn.training import workdir
from fedjax_bn.training.workdir import Record

PyTree = Any
_AGAIN = 60.0  # seconds until a refused node is asked again, at least
_SHARE = 10  # nodes that never answer take a part of 1 / _SHARE of the time at most
_MOST_FORM = 2**20  # characters of a form of samples
_MOST_COUNT = 2**16  # of classes, three times as many as ImageNet-21k has, and of boxes
_MOST_REFUSED = 20  # refusals in the record of a round
_REASON = 500  # characters of a reason in logs and records
_MOST_LOSS = 1e6
_BLOCK = 2**14  # numbers of a leaf that `_norm` squares at once
_FILE = "clients.json"


class _Member(NamedTuple):
    node: int  # the current number of its node
    hello: Hello


class Members:
    """The clients that the server has met, by their numbers.

    Attributes:
      grid: Flower's Grid, which has their nodes.
      run: the run config.
      connected: those that are connected, with node and `Hello`.
      sizes: the sizes that they reported last, also of clients that have gone.
      keys: the fingerprints of the keys to which their numbers are bound.
      refused: node, with the fingerprint of its key -> why it was refused since the last record.
      misfits: nodes of members that answered otherwise than they had presented themselves; `meet`
        asks them again.
    """

    def __init__(self, grid: Grid, run: Run, place: Path) -> None:
        """Reads names, bindings and sizes in a server's workdir; there are none in a new one.

        Raises WorkdirError if the file is damaged, or missing although rounds were played.
        """
        self.grid, self.run, self._path = grid, run, place / _FILE
        self.connected: dict[int, _Member] = {}
        self.refused: dict[str, str] = {}
        self.misfits: set[int] = set()
        # node that was refused or asked again -> the time from `time.monotonic` at which it may be
        # asked the next time
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
            raise WorkdirError(
                f"{self._path} has a client without its name or key ({error}): give back that file "
                "as it was, or begin a new federation in another workdir"
            ) from error
        self.keys |= run.listed_keys()

    def name(self, client: int) -> str:
        """Returns the name of a client in the records."""
        return self._names.get(client, f"client-{client}")

    def save(self) -> None:
        """Writes names, bindings and sizes of all clients; from now on the names stay."""
        self._names = {k: self.name(k) for k in range(self.run.clients)}
        content = {
            str(k): {"name": name, "key": self.keys.get(k, "")} for k, name in self._names.items()
        }
        for k, size in self.sizes.items():
            content[str(k)]["size"] = size
        if not self._path.exists() or workdir.read_json(self._path) != content:
            workdir.write_json(self._path, content)

    def meet(self, order: Order) -> None:
        """Asks new nodes to present themselves, and forgets members whose node has gone.

        If a node's answer cannot be used, if its number is bound to another key, or if another node
        is the same client, the log and `refused` name the node, and it is asked again after a
        minute or, if it did not answer, after ten times the time limit. Misfits are asked like new
        nodes, but not twice within ten times the time limit.
        """
        prints = {node.node_id: _fingerprint(node.public_key) for node in self.grid.get_nodes()}
        self._again = {node: at for node, at in self._again.items() if at > time.monotonic()}
        misfits, self.misfits = self.misfits - self._again.keys(), set()
        self.connected = {
            k: member
            for k, member in self.connected.items()
            if member.node in prints.keys() - misfits
        }
        met_nodes = {member.node for member in self.connected.values()}
        questions = {
            node: messages.packed(order)
            for node in sorted(prints.keys() - met_nodes - self._again.keys())
        }
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

    def _admit(self, node: int, key: str, reply: Reply, order: Order) -> None:
        """Makes a node that presents itself a member; raises ValueError if it cannot be."""
        client, hello = _presented(reply, order, self.run.size_bound)
        problem = "which is there already" if client in self.connected else ""
        if self.run.client_keys != "any":
            clients_of_key = [k for k, bound in self.keys.items() if key and bound == key]
            if self.keys.get(client, key) != key or {*clients_of_key} - {client}:
                problem = (
                    f"which is bound to {self.keys.get(client)}, with {key or 'no key'}, which is "
                    f"bound to clients {clients_of_key}: see client-keys in the run config"
                )
        if problem:
            raise ValueError(f"it presents itself as client {client}, {problem}")
        self.connected[client], self.sizes[client] = _Member(node, hello), hello.size
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


class Accepted(NamedTuple):
    """An accepted upload, with NumPy arrays."""

    upload: Upload  # the client's upload
    personal: PyTree  # the personal leaves that were sent too; () for none
    norm: float  # the norm of the client's update


def _fingerprint(key: bytes) -> str:
    """Returns the fingerprint of a public key in PEM, as `ssh-keygen -lf` shows it."""
    # It is "" for other bytes: nodes of Flower's simulation have random ones.
    try:
        public_key = load_pem_public_key(key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _presented(reply: Reply, order: Order, bound: int) -> tuple[int, Hello]:
    """Returns a client's number and its `Hello`; raises ValueError if they cannot be used."""
    content = content_of(reply, order, None)
    client = messages.record_in(content, messages.Answer).client
    hello = messages.record_in(content, Hello)
    if not (0 <= client < order.population and 0 <= hello.size <= bound):
        raise ValueError(
            f"it presents itself as client {client} with {hello.size} samples, but clients are "
            f"numbered below {order.population} and have {bound} samples at most: see clients and "
            "size-bound in the run config"
        )
    try:
        is_form = len(hello.form) <= _MOST_FORM and _is_form(json.loads(hello.form))
    except Exception:  # the client chooses the text, and with it the error
        is_form = False
    if not is_form:
        raise ValueError(f"no samples have the form that it gives for its own: {hello.form:.80}")
    return client, hello


def _is_form(form: Record) -> bool:
    """Returns whether `form_of` writes this form, without names, of some samples."""
    counts = (form["num_classes"], form.get("boxes", 1))
    masks_fit = "masks" not in form or is_of_masks(form["masks"], form["shape"])
    if (
        impossible_samples(*(form[name] for name in ("shape", "dtype", "mean", "std")))
        or not all(type(count) is int and 0 < count <= _MOST_COUNT for count in counts)
        or not masks_fit
    ):
        return False
    names = {"dataset": "federation", "clients": ["one"]}
    written = form_of(dataset_of(form | names))
    if "classes" in form:
        written["classes"] = [*map(str, form["classes"])]
    # Texts are compared, because in Python 1, 1.0 and True are equal.
    texts = [json.dumps(x, sort_keys=True) for x in (form | names, written)]
    return texts[0] == texts[1]


def accept(
    arrays: Mapping[str, np.ndarray],
    forms: tuple[Upload, PyTree],
    shared: PyTree,
    client: int,
    population: int,
    hello: Hello,
    norm_bound: float,
) -> Accepted:
    """Returns the upload in the named arrays that a client sent.

    Its names, shapes and dtypes must be exactly those of the method, its numbers finite, no running
    variance negative, and its losses at most 1e6 in absolute value, or NaN if it reports none.

    Args:
      arrays: by name.
      forms: of the upload, and of the personal leaves that are sent too; () for none.
      shared: the shared leaves that were broadcast.
      client, population: the number of the client that was asked, and K.
      hello: how the client presented itself. Without a size it counts as 1 sample.
      norm_bound: of the update y_k - x, of the message, and of the personal leaves.

    Raises:
      MisfitError: the answer does not fit the method, or what the client said of itself.
      ValueError: the upload is not accepted for another reason.
    """
    # In a message only personal leaves have a prefix; here the upload's leaves get one too.
    split = {
        name if name.startswith("personal/") else f"upload/{name}": array
        for name, array in arrays.items()
    }
    try:
        trees = from_named(split, {"upload": forms[0], "personal": forms[1]})
    except ValueError as error:
        raise MisfitError(str(error)) from error
    upload, personal = trees["upload"], trees["personal"]
    if int(upload.client) != client or int(upload.size) != (hello.size or 1):
        raise MisfitError(
            f"it speaks for client {int(upload.client)} with {int(upload.size)} samples, where it "
            f"presented itself as client {client} with {hello.size or 'no size, which counts as 1'}"
        )
    if int(upload.population) != population or not (upload.participates and upload.finite):
        raise ValueError(
            "its update is not finite, or of another federation, or of a client that sits out"
        )
    trees = {"shared": upload.shared, "message": upload.message, "personal": personal}
    check_numbers(to_named(trees))
    norms = {"message": _norm(upload.message), "personal leaves": _norm(personal)}
    norms["update"] = _norm(upload.shared, shared)
    sizes = {f"norm of its {part}": (norm, norm_bound) for part, norm in norms.items()}
    for name in ("risk", "loss"):
        value = float(getattr(upload, name))
        if hello.losses == math.isnan(value):
            raise MisfitError(f"it sends a {name} of {value:.4g}, and losses={hello.losses}")
        if hello.losses:
            sizes[name] = abs(value), _MOST_LOSS
    for name, (size, bound) in sizes.items():
        if not size <= bound:  # NaN is not
            raise ValueError(f"the {name}, {size:.4g}, is above {bound:g} (see norm-bound)")
    return Accepted(upload, personal, norms["update"])


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
