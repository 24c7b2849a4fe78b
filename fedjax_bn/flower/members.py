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
from collections.abc import Mapping, Set
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
from fedjax_bn.engine.named_arrays import check_numbers, from_named, to_named
from fedjax_bn.flower import messages
from fedjax_bn.flower.messages import Hello, MisfitError, Order, Reply, content_of
from fedjax_bn.flower.settings import Run
from fedjax_bn.run.files.finished import impossible
from fedjax_bn.state import Upload
from fedjax_bn.training import workdir
from fedjax_bn.training.workdir import Record

PyTree = Any
_AGAIN = 60.0  # seconds until a refused node is asked again, at least
_SHARE = 10  # nodes that never answer take a part of 1 / _SHARE of the time at most
_MOST_FORM = 2**20  # characters of a form of samples
_MOST_CLASSES = 2**16  # three times as many as ImageNet-21k has
_MOST_REFUSED = 20  # refusals in the record of a round
_REASON = 500  # characters of a reason in logs and records
_MOST_LOSS = 1e6
_BLOCK = 2**14  # numbers of a leaf that `_norm` squares at once
_FILE = "clients.json"


class _Member(NamedTuple):
    """A client that has presented itself: the current number of its node, and its `Hello`."""

    node: int
    hello: Hello


class Met(NamedTuple):
    """The clients that the server has met."""

    members: Mapping[int, _Member] = {}  # client -> member, for clients that are connected
    # node that was refused or asked again -> the time from `time.monotonic` at which it may be
    # asked the next time
    again: Mapping[int, float] = {}
    # client -> the size that it reported last, also for clients that have gone
    sizes: Mapping[int, int] = {}
    names: Mapping[int, str] = {}  # client -> its name in the records, which stays
    # client -> the fingerprint of the key to which its number is bound
    keys: Mapping[int, str] = {}
    # node, with the fingerprint of its key -> why it was refused since the last record
    refused: Mapping[str, str] = {}
    # nodes of members that answered otherwise than they had presented themselves; `meet` asks them
    # again
    misfits: Set[int] = frozenset()

    def name(self, client: int) -> str:
        """Returns the name of a client in the records."""
        return self.names.get(client, f"client-{client}")


class Accepted(NamedTuple):
    """An accepted upload, with NumPy arrays."""

    upload: Upload  # the client's upload
    personal: PyTree  # the personal leaves that were sent too; () for none
    norm: float  # the norm of the client's update


def read_clients(place: Path, clients: int) -> Met:
    """Returns the names, bindings and sizes in a server's workdir; none in a new workdir.

    Raises WorkdirError if the file is damaged, or missing although rounds were played.
    """
    path = place / _FILE
    if not path.exists() and not workdir.rounds_recorded(place / "metrics.jsonl"):
        return Met()
    content = workdir.read_json(path)
    try:
        entries = {k: content[str(k)] for k in range(clients) if str(k) in content}
        keys = {k: entry["key"] for k, entry in entries.items() if entry["key"]}
        sizes = {k: entry["size"] for k, entry in entries.items() if "size" in entry}
        return Met(sizes=sizes, names={k: entry["name"] for k, entry in entries.items()}, keys=keys)
    except (KeyError, TypeError) as error:
        raise WorkdirError(
            f"{path} has a client without its name or key ({error}): give back that file as it "
            "was, or begin a new federation in another workdir"
        ) from error


def write_clients(place: Path, met: Met, clients: int) -> Met:
    """Writes names, bindings and sizes of all clients, and returns `met` with names that stay."""
    names = {k: met.name(k) for k in range(clients)}
    content = {str(k): {"name": names[k], "key": met.keys.get(k, "")} for k in names}
    for k, size in met.sizes.items():
        content[str(k)]["size"] = size
    path = place / _FILE
    if not path.exists() or workdir.read_json(path) != content:
        workdir.write_json(path, content)
    return met._replace(names=names)


def meet(grid: Grid, met: Met, order: Order, run: Run) -> Met:
    """Asks new nodes to present themselves; returns the clients that are connected now.

    If a node's answer cannot be used, if its number is bound to another key, or if another node is
    the same client, the log and `Met.refused` name the node, and it is asked again after a minute
    or, if it did not answer, after ten times the time limit. Members whose node has gone are left
    out, and misfits are asked like new nodes, but not twice within ten times the time limit.
    """
    prints = {node.node_id: _fingerprint(node.public_key) for node in grid.get_nodes()}
    again = {node: at for node, at in met.again.items() if at > time.monotonic()}
    misfits = met.misfits - again.keys()
    trusted_nodes = prints.keys() - misfits
    members = {k: member for k, member in met.members.items() if member.node in trusted_nodes}
    unmet_nodes = prints.keys() - {member.node for member in members.values()} - again.keys()
    questions = {node: messages.packed(order) for node in sorted(unmet_nodes)}
    kind, seconds = MessageType.QUERY, run.time_limit
    replies = messages.exchange(grid, questions, kind, seconds, lambda node, reply: reply)
    keys, names, refused = {**met.keys, **run.listed_keys()}, dict(met.names), dict(met.refused)
    for node, reply in replies.items():
        try:
            client, hello = _presented(reply, order, run.size_bound)
            if run.client_keys != "any":
                _check_key(client, prints[node], keys)
            if client in members:
                raise ValueError(f"it presents itself as client {client}, which is there already")
        except ValueError as error:
            reason = short(str(error), _REASON)
            log(WARNING, "node %s is left out: %s", node, reason)
            if len(refused) < _MOST_REFUSED:
                refused[f"node {node} {prints[node]}".strip()] = reason
            pause = max(_AGAIN, 0 if reply else _SHARE * seconds)
            again[node] = time.monotonic() + pause
            continue
        if node in misfits:  # it stays a member for so long, whatever it answers
            again[node] = time.monotonic() + _SHARE * seconds
        members[client] = _Member(node, hello)
        if run.client_keys != "any" and prints[node]:
            keys[client] = prints[node]
        names.setdefault(client, _name(client, hello.name, names, order.population))
    sizes = {**met.sizes, **{k: member.hello.size for k, member in members.items()}}
    return Met(dict(sorted(members.items())), again, sizes, names, keys, refused)


def _fingerprint(key: bytes) -> str:
    """Returns the fingerprint of a public key in PEM, as `ssh-keygen -lf` shows it.

    It is "" for other bytes: nodes of Flower's simulation have random ones.
    """
    try:
        public_key = load_pem_public_key(key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _check_key(client: int, key: str, keys: Mapping[int, str]) -> None:
    """Raises ValueError if a number is bound to another key, or the key to another number."""
    owner = keys.get(client, key)
    clients_of_key = [k for k, bound in keys.items() if key and bound == key and k != client]
    if owner != key or clients_of_key:
        raise ValueError(
            f"it presents itself as client {client}, which is bound to {keys.get(client)}, with "
            f"{key or 'no key'}, which is bound to clients {clients_of_key}: see client-keys in "
            "the run config"
        )


def _name(client: int, reported_name: str, names: Mapping[int, str], population: int) -> str:
    """Returns a name for the records that no other client has."""
    # Records have an entry for each name and one for "mean", so names must be unique.
    taken_names = {name for k, name in names.items() if k != client} | {"mean"}
    taken_names |= {f"client-{k}" for k in range(population) if k != client}
    name = short(reported_name[:200], 80) or f"client-{client}"
    while name in taken_names:
        name += f"-{client}"
    return name


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
        text = hello.form if len(hello.form) <= _MOST_FORM else ""
        form = json.loads(text) | {"dataset": "federation", "clients": ["one"]}
        bad_entry = _wrong_entry(form) or impossible(form)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its form of samples is not a JSON object: {hello.form:.80}") from error
    if bad_entry or form["num_classes"] > _MOST_CLASSES:
        raise ValueError(
            f"no samples have the form that it gives for its own ({bad_entry or 'num_classes'})"
        )
    return client, hello


def _wrong_entry(form: Record) -> str:
    """Returns the entry of a client's form of samples that has another type than its own, or ""."""

    # A client chooses this form, so nothing of it is used before it is checked.
    def is_count(value: Any) -> bool:
        return type(value) is int and 0 < value < 2**31

    def is_number(value: Any) -> bool:
        return type(value) is float or (type(value) is int and abs(value) < 2**63)

    def is_text(value: Any) -> bool:
        return isinstance(value, str)

    lists = {"shape": is_count, "mean": is_number, "std": is_number}
    lists |= {name: is_text for name in ("classes", "masks") if name in form}
    singles = {"num_classes": is_count, "dtype": is_text}
    singles |= {"boxes": is_count} if "boxes" in form else {}
    for name, holds in lists.items():
        if not (isinstance(form.get(name), list) and all(map(holds, form[name]))):
            return name
    return next((name for name, holds in singles.items() if not holds(form.get(name))), "")


def accept(
    arrays: Mapping[str, np.ndarray],
    forms: tuple[Upload, PyTree],
    shared: PyTree,
    client: int,
    population: int,
    hello: Hello,
    norm_bound: float,
) -> Accepted:
    """Returns the upload in the arrays that a client sent.

    Its names, shapes and dtypes must be exactly those of the method, its numbers finite, no running
    variance negative, and its losses at most 1e6 in absolute value, or NaN if it reports none.

    Args:
      arrays: name -> array [...].
      forms: the form of the upload, and of the personal leaves that are sent too; () for none.
      shared: the shared leaves that were broadcast, [...] as in the upload.
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
    starts = [None] * len(leaves) if start is None else jax.tree.leaves(start)
    for leaf, less in zip(leaves, starts, strict=True):
        flat = np.asarray(leaf).reshape(-1)
        less = None if less is None else np.asarray(less).reshape(-1)
        # Leaves have millions of numbers, and a block of them fits into the caches. `np.dot` is
        # slower: BLAS starts threads that spin, 3 CPU seconds for 57 MB.
        for begin in range(0, flat.size, _BLOCK):
            part = slice(begin, begin + _BLOCK)
            block = flat[part].astype(np.float64)
            if less is not None:
                block -= less[part].astype(np.float64)
            with np.errstate(over="ignore"):  # an infinite norm is above every bound
                total += float(np.square(block, out=block).sum())
    return math.sqrt(total)
