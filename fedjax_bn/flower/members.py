"""Meets the clients: who they are, and whether what they say of themselves can be used.

A client's number is bound to the public key of its SuperNode, which Flower has verified. The
server's folder keeps the bindings, the clients' names in records and the sizes by which they are
drawn, so that all survive a restart and the client itself:

    WORKDIR/clients.json    {"0": {"name": "hospital-a", "key": "SHA256:...", "size": 120}, ...}

The key is "", and the size is missing, until a client has presented itself with one.
"""

import base64
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Set
from logging import WARNING
from pathlib import Path
from typing import Any, NamedTuple

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
from fedjax_bn.flower import messages
from fedjax_bn.flower.messages import Hello, Order, Reply, content_of
from fedjax_bn.flower.settings import Run
from fedjax_bn.run.files.finished import impossible
from fedjax_bn.training import workdir
from fedjax_bn.training.workdir import Record

_AGAIN = 60.0  # seconds until a refused node is asked again, at least
_SHARE = 10  # nodes that never answer take a part of 1 / _SHARE of the time at most
_MOST_FORM = 2**20  # characters of a form of samples
_MOST_CLASSES = 2**16  # three times as many as ImageNet-21k has
_MOST_REFUSED = 20  # refusals in the record of a round
_REASON = 500  # characters of a reason in logs and records
_FILE = "clients.json"


class _Member(NamedTuple):
    """A client that has presented itself.

    Attributes:
      node: Flower's current number of the client's node.
      hello: how the client presented itself.
    """

    node: int
    hello: Hello


class Met(NamedTuple):
    """The clients that the server has met.

    Attributes:
      members: client -> member, for clients that are connected.
      again: node that was refused or asked again -> the time from `time.monotonic` at which it may
        be asked the next time.
      sizes: client -> the size that it reported last, also for clients that have gone.
      names: client -> its name in the records, which stays.
      keys: client -> the fingerprint of the key to which its number is bound.
      refused: node, with the fingerprint of its key -> why it was refused since the last record.
      misfits: nodes of members that answered otherwise than they had presented themselves; `meet`
        asks them again.
    """

    members: Mapping[int, _Member] = {}
    again: Mapping[int, float] = {}
    sizes: Mapping[int, int] = {}
    names: Mapping[int, str] = {}
    keys: Mapping[int, str] = {}
    refused: Mapping[str, str] = {}
    misfits: Set[int] = frozenset()

    def name(self, client: int) -> str:
        """Returns the name of a client in the records."""
        return self.names.get(client, f"client-{client}")


def fingerprint(key: bytes) -> str:
    """Returns the fingerprint of a public key, as `ssh-keygen -lf` shows it, or "" for other bytes.

    `key` is in PEM, Flower's form. Nodes of Flower's simulation have random bytes for it.
    """
    try:
        public_key = load_pem_public_key(key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def read_clients(place: Path, clients: int) -> Met:
    """Returns the names, bindings and sizes in a server's workdir; none in a new workdir.

    Raises:
      WorkdirError: the file is damaged, or missing although rounds were played.
    """
    path = place / _FILE
    if not path.exists() and workdir.rounds_recorded(place / "metrics.jsonl"):
        raise WorkdirError(
            f"{place} has rounds, but no {_FILE} with the names of their clients: give back that "
            "file, or begin a new federation in another workdir"
        )
    content = workdir.read_json(path) if path.exists() else {}
    entries = {k: content[str(k)] for k in range(clients) if str(k) in content}
    try:
        keys = {k: entry["key"] for k, entry in entries.items() if entry["key"]}
        sizes = {k: entry["size"] for k, entry in entries.items() if "size" in entry}
        names = {k: entry["name"] for k, entry in entries.items()}
    except (KeyError, TypeError) as error:
        raise WorkdirError(
            f"{path} has a client without its name or key ({error}): give back that file as it "
            "was, or begin a new federation in another workdir"
        ) from error
    return Met(sizes=sizes, names=names, keys=keys)


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
    or more, also if it was away. Members whose node has gone are left out, and misfits are asked
    like new nodes, but not twice within ten times the time that the server waited for the first
    answer.

    Args:
      grid: Flower's Grid.
      met: the result of the last call.
      order: the header of the question.
      run: the run config, with the time to wait for an answer and the bounds on what it says.
    """
    prints = {node.node_id: fingerprint(node.public_key) for node in grid.get_nodes()}
    start = time.monotonic()
    again = {node: at for node, at in met.again.items() if at > start}
    misfits, connected = met.misfits - again.keys(), met.members.items()
    members = {
        k: member for k, member in connected if member.node in prints and member.node not in misfits
    }
    unmet_nodes = sorted(
        prints.keys() - {member.node for member in members.values()} - again.keys()
    )
    questions = {node: messages.packed(order) for node in unmet_nodes}
    kind, seconds = MessageType.QUERY, run.time_limit
    replies = messages.exchange(
        grid, questions, kind, seconds, lambda node, reply: (reply, time.monotonic())
    )
    fetched = start
    keys, names, refused = {**met.keys, **run.listed_keys()}, dict(met.names), dict(met.refused)
    for node in unmet_nodes:
        reply, at = replies[node]
        waited, fetched = at - fetched, at
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
            # Nodes that did not answer were waited for together.
            waited = at - start if reply is None else 0.0
            again[node] = time.monotonic() + max(_AGAIN, _SHARE * waited)
            continue
        if node in misfits:  # it stays a member for so long, whatever it answers
            again[node] = time.monotonic() + _SHARE * waited
        members[client] = _Member(node, hello)
        if run.client_keys != "any" and prints[node]:
            keys[client] = prints[node]
        names.setdefault(client, _name(client, hello.name, names, order.population))
    sizes = {k: member.hello.size for k, member in members.items()}
    fields = dict(sorted(members.items())), again, {**met.sizes, **sizes}, names, keys, refused
    return Met(*fields)


def _check_key(client: int, key: str, keys: Mapping[int, str]) -> None:
    """Raises ValueError if a number is bound to another key, or the key to another number."""
    owner = keys.get(client, key)
    if owner != key:
        raise ValueError(
            f"it presents itself as client {client}, whose number is bound to the key {owner}, "
            f"with {key or 'no key'}: see client-keys in the run config"
        )
    bound_client = next((k for k, bound in keys.items() if k != client and bound == key), None)
    if bound_client is not None and key:
        raise ValueError(
            f"it presents itself as client {client}, but its key {key} is bound to client "
            f"{bound_client}: see client-keys in the run config"
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
    if not 0 <= client < order.population:
        raise ValueError(
            f"it presents itself as client {client}, but there are {order.population}, from 0: see "
            "clients in the run config"
        )
    if not 0 <= hello.size <= bound:
        raise ValueError(
            f"it reports {hello.size} samples, and size-bound={bound} in the run config allows "
            "from 0 to that number: raise it if the client has so many"
        )
    try:
        if len(hello.form) > _MOST_FORM:
            raise ValueError(f"it has more than {_MOST_FORM} characters")
        form = json.loads(hello.form) | {"dataset": "federation", "clients": ["one"]}
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its form of samples is not a JSON object: {hello.form:.80}") from error
    bad_entry = _wrong_entry(form) or impossible(form)
    if bad_entry or form["num_classes"] > _MOST_CLASSES:
        raise ValueError(
            f"no samples have the form that it gives for its own ({bad_entry or 'num_classes'})"
        )
    return client, hello


def _wrong_entry(form: Record) -> str:
    """Returns the entry of a client's form of samples that has another type than its own, or "".

    A client chooses this form, so nothing of it is used before it is checked.
    """

    def of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda value: isinstance(value, list) and all(map(kind, value))

    def is_count(value: Any) -> bool:
        return type(value) is int and 0 < value < 2**31

    def is_number(value: Any) -> bool:
        return type(value) is float or (type(value) is int and abs(value) < 2**63)

    def is_text(value: Any) -> bool:
        return isinstance(value, str)

    needed = {"num_classes": is_count, "shape": of(is_count), "dtype": is_text}
    needed |= {"mean": of(is_number), "std": of(is_number)}
    further = {"classes": of(is_text), "boxes": is_count, "masks": of(is_text)}
    checks = needed | {name: further[name] for name in further.keys() & form.keys()}
    return next((name for name, holds in checks.items() if not holds(form.get(name))), "")
