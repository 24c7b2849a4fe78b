"""Who is there: which node of Flower is which client, and how they are asked."""

import json
import time
from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import NamedTuple

from flwr.app import Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedjax_bn.arguments.text import shown
from fedjax_bn.flower.records import Order, answer_in, asking, hello_in
from fedjax_bn.run.files.finished import impossible
from fedjax_bn.run.files.forms import FINISHED, misfit

_POLL = 0.5  # seconds between questions for replies
_AGAIN = 60.0  # seconds until a node that was refused is asked again


class Member(NamedTuple):
    """A client that has said who it is.

    Attributes:
      node: Flower's number of its node now.
      client: its number.
      name: how it is called.
      size: of its training samples; 0 where it keeps that to itself.
      losses: whether it tells the losses of its training.
      scores: whether it tells the accuracies of its model.
      form: of its samples, as JSON.
    """

    node: int
    client: int
    name: str
    size: int
    losses: bool
    scores: bool
    form: str


def exchange(
    grid: Grid, contents: Mapping[int, RecordDict], kind: str, seconds: float, group: str = ""
) -> dict[int, Message]:
    """Sends each node its message and returns, by node, the replies that come in time.

    Args:
      grid: Flower's.
      contents: node -> what it is sent.
      kind: `MessageType.TRAIN` and the like.
      seconds: for which replies are waited for, and messages are good.
      group: how Flower groups them, the round.

    Returns:
      node -> its reply, which may be an error; nothing of nodes that did not answer.
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


class Met(NamedTuple):
    """Who was met.

    Attributes:
      members: by number of client.
      refused: node -> when it may be asked again, on the clock of `time.monotonic`.
      sizes: by number, what every client said last of its size, those too that are gone.
    """

    members: dict[int, Member]
    refused: dict[int, float]
    sizes: dict[int, int]


NOBODY = Met({}, {}, {})


def meet(grid: Grid, met: Met, order: Order, seconds: float) -> Met:
    """Who is connected now: those met before, and those that say who they are.

    Args:
      grid: Flower's.
      met: before; members whose node has gone are left out.
      order: the header of the question.
      seconds: for which an answer is waited for.

    Returns:
      Who is there, and who was refused; a node whose answer cannot be used, or whose place is
      taken, is named in the log and asked again after a minute.
    """
    nodes, now = set(grid.get_node_ids()), time.monotonic()
    found = {k: member for k, member in met.members.items() if member.node in nodes}
    refused = {node: again for node, again in met.refused.items() if node in nodes and again > now}
    new = sorted(nodes - {member.node for member in found.values()} - set(refused))
    replies = exchange(grid, {node: asking(order) for node in new}, MessageType.QUERY, seconds)
    for node in new:
        try:
            member = _member_of(node, replies.get(node), order)
            _check_place(member, found, order.population)
            found[member.client] = _called_apart(member, found, order.population)
        except ValueError as error:
            log(WARNING, "node %s is left out: %s", node, shown(str(error)))
            refused[node] = time.monotonic() + _AGAIN
    sizes = met.sizes | {k: member.size for k, member in found.items()}
    return Met(dict(sorted(found.items())), refused, sizes)


def content_of(reply: Message | None, order: Order, client: int) -> RecordDict:
    """The content of a client's reply to an order.

    Args:
      reply: as `exchange` gives it; None where it did not come.
      order: the header of what was asked.
      client: who was asked.

    Raises:
      ValueError: there is none, it is an error, or it answers to something else.
    """
    if reply is None:
        raise ValueError("it did not answer in time")
    if reply.has_error():
        raise ValueError(f"it failed: {reply.error.reason}")
    answer = answer_in(reply.content)
    if answer.method != order.method:
        raise ValueError(f"it answers as {answer.method:.40}, not as {order.method}")
    if answer.federation != order.federation or answer.client != client:
        raise ValueError("it answers for another federation or another client")
    return reply.content


def _member_of(node: int, reply: Message | None, order: Order) -> Member:
    """Who a node says that it is; ValueError where it says nothing that can be used."""
    answered = reply is not None and not reply.has_error()
    client = answer_in(reply.content).client if answered else -1
    hello = hello_in(content_of(reply, order, client))
    _check_form(hello.form)
    name = shown(hello.name)[:80] or f"client-{client}"
    return Member(node, client, name, *hello[1:])


def _check_form(text: str) -> None:
    """Raises ValueError where no samples have the form that a node says of its own."""
    try:
        form = json.loads(text) | {"dataset": "federation", "clients": ["one"]}
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its form of samples is no JSON object: {text:.80}") from error
    if wrong := misfit(form, FINISHED["form"], "its form of samples") or impossible(form):
        raise ValueError(f"no samples have the form that it says of its own ({wrong})")


def _called_apart(member: Member, found: Mapping[int, Member], population: int) -> Member:
    """The member with a name that nobody else has, nor a column of the records, by its number."""
    others = {other.name for other in found.values()} | {"mean"}
    others |= {f"client-{k}" for k in range(population) if k != member.client}
    name = member.name
    while name in others:
        name += f"-{member.client}"
    return member._replace(name=name)


def _check_place(member: Member, found: Mapping[int, Member], population: int) -> None:
    """Raises ValueError where a client has no place in the federation."""
    if not 0 <= member.client < population:
        raise ValueError(
            f"it says that it is client {member.client}, but there are {population}, from 0: see "
            "clients in the run config"
        )
    if member.client in found:
        raise ValueError(f"it says that it is client {member.client}, which is there already")
    if not 0 <= member.size < 2**31:
        raise ValueError(f"it says that it has {member.size} samples")


def sizes_known(members: Iterable[Member]) -> list[int]:
    """The numbers of training samples that clients have told, without those that tell none."""
    return [member.size for member in members if member.size]
