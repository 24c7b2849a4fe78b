"""Who is connected: which node of Flower is which client, and how clients are asked."""

import json
import time
from collections.abc import Mapping
from logging import WARNING
from typing import NamedTuple

from flwr.app import Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedjax_bn.arguments.text import shown
from fedjax_bn.flower.records import Answer, Hello, Order, packed, record_in
from fedjax_bn.run.files.finished import impossible
from fedjax_bn.run.files.forms import FINISHED, misfit

_POLL = 0.5  # seconds between questions for replies
_AGAIN = 60.0  # seconds until a node that was refused is asked again


class Member(NamedTuple):
    """A client that has presented itself.

    Attributes:
      node: Flower's number of its node now.
      client: its number.
      name: how it is called.
      size: of its training samples; 0 where it does not report it.
      losses: whether it reports the losses of its training.
      scores: whether it reports the accuracies of its model.
      form: of its samples, as JSON.
    """

    node: int
    client: int
    name: str
    size: int
    losses: bool
    scores: bool
    form: str


class Met(NamedTuple):
    """Who was met.

    Attributes:
      members: by number of client.
      refused: node -> when it may be asked again, on the clock of `time.monotonic`.
      sizes: by number, the size that every client reported last, those too that are gone.
    """

    members: dict[int, Member]
    refused: dict[int, float]
    sizes: dict[int, int]


NOBODY = Met({}, {}, {})


def exchange(
    grid: Grid, contents: Mapping[int, RecordDict], kind: str, seconds: float, group: str = ""
) -> dict[int, Message]:
    """Sends each node its message and returns the replies that come in time.

    Args:
      grid: Flower's.
      contents: node -> what it is sent.
      kind: `MessageType.TRAIN` and the like.
      seconds: how long to wait for replies; messages are valid as long.
      group: how Flower groups them, the round.

    Returns:
      node -> its reply, which may be an error; nodes that did not answer are missing.
    """
    nodes = list(contents)
    messages = [Message(contents[node], node, kind, ttl=seconds, group_id=group) for node in nodes]
    given = list(grid.push_messages(messages)) if messages else []
    waiting = {m: node for m, node in zip(given, nodes, strict=False) if m is not None}
    replies, end = {}, time.monotonic() + seconds
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            node = waiting.pop(reply.metadata.reply_to_message_id, None)
            if node is not None:
                replies[node] = reply
        if not waiting or time.monotonic() > end:
            break
        time.sleep(min(_POLL, max(0.0, end - time.monotonic())))
    return replies


def meet(grid: Grid, met: Met, order: Order, seconds: float) -> Met:
    """Returns who is connected now: those met before, and those that present themselves.

    A node whose answer cannot be used, or whose place is taken, is named in the log and asked again
    after a minute.

    Args:
      grid: Flower's.
      met: before; members whose node has gone are left out.
      order: the header of the question.
      seconds: how long to wait for an answer.
    """
    nodes, now = set(grid.get_node_ids()), time.monotonic()
    found = {k: member for k, member in met.members.items() if member.node in nodes}
    refused = {node: again for node, again in met.refused.items() if node in nodes and again > now}
    new = sorted(nodes - {member.node for member in found.values()} - set(refused))
    replies = exchange(grid, {node: packed(order) for node in new}, MessageType.QUERY, seconds)
    for node in new:
        try:
            member = _member_of(node, replies.get(node), order, found)
            found[member.client] = member
        except ValueError as error:
            log(WARNING, "node %s is left out: %s", node, shown(str(error)))
            refused[node] = time.monotonic() + _AGAIN
    sizes = met.sizes | {k: member.size for k, member in found.items()}
    return Met(dict(sorted(found.items())), refused, sizes)


def content_of(reply: Message | None, order: Order, client: int | None) -> RecordDict:
    """Returns the content of a client's reply to an order.

    Args:
      reply: as `exchange` gives it; None where it did not come.
      order: the header of the question.
      client: who was asked; None where the answer is to give its number.

    Raises:
      ValueError: it is missing, is an error, or is of another kind.
    """
    if reply is None:
        raise ValueError("it did not answer in time")
    if reply.has_error():
        raise ValueError(f"it failed: {reply.error.reason}")
    answer = record_in(reply.content, Answer)
    if answer.method != order.method:
        raise ValueError(f"it answers as {answer.method:.40}, not as {order.method}")
    if answer.federation != order.federation or client not in (None, answer.client):
        raise ValueError("it answers for another federation or another client")
    return reply.content


def _member_of(
    node: int, reply: Message | None, order: Order, found: Mapping[int, Member]
) -> Member:
    """The member that a node is; raises ValueError where its answer cannot be used."""
    content = content_of(reply, order, None)
    client, hello = record_in(content, Answer).client, record_in(content, Hello)
    try:
        form = json.loads(hello.form) | {"dataset": "federation", "clients": ["one"]}
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its form of samples is not a JSON object: {hello.form:.80}") from error
    if wrong := misfit(form, FINISHED["form"], "its form of samples") or impossible(form):
        raise ValueError(f"no samples have the form that it gives for its own ({wrong})")
    if not 0 <= client < order.population:
        raise ValueError(
            f"it presents itself as client {client}, but there are {order.population}, from 0: see "
            "clients in the run config"
        )
    if client in found:
        raise ValueError(f"it presents itself as client {client}, which is there already")
    if not 0 <= hello.size < 2**31:
        raise ValueError(f"it reports {hello.size} samples")
    # No two clients share a name, and none has that of a column of the records.
    others = {other.name for other in found.values()} | {"mean"}
    others |= {f"client-{k}" for k in range(order.population) if k != client}
    name = shown(hello.name)[:80] or f"client-{client}"
    while name in others:
        name += f"-{client}"
    return Member(node, client, name, *hello[1:])
