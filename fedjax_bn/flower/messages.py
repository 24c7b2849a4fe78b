"""Packs, sends and reads messages: a short header with named arrays or scores."""

import time
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import NamedTuple, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

SCORES = "scores"
_ARRAYS, _HEADER, _ABOUT = "arrays", "header", "about"
BATCH = "batch_statistics"  # the accuracy with the statistics of test batches
SCORED = "accuracy", "validation", BATCH
TESTED_ON_VALIDATION = "tested_on_validation"  # among the scores: 100 if so, else 0
_NUMPY = "numpy.ndarray"  # Flower's name for the format of `numpy.save`
_POLL = 0.5  # seconds between polls for replies; `Grid.send_and_receive` waits 3
_SESSION = 180.0  # seconds for which Flower waits for a reply that was announced but not sent
_Kind = TypeVar("_Kind", bound=NamedTuple)
_Result = TypeVar("_Result")
Reply = Message | Exception | None  # what a node answered, see `exchange`


class Order(NamedTuple):
    """The header of the server's message to a client."""

    federation: str  # the name of the federation; a client has one own part for each
    method: str  # the configured method's name
    # the rounds finished when the server last accepted an upload of this client, which begins with
    # its own part of that time; 0 is the common start
    begin: int
    population: int  # K, the number of all clients
    longest: int  # samples of the largest client, which bound the batch size; 0 if none says
    serve_unseen: bool  # whether the server asks for the client's personal leaves
    round: int = 0  # the round that is played or evaluated, from 1; 0 in a question for a `Hello`
    digest: str = ""  # of the server's facts (`handshake`); "" before it has all
    facts: str = ""  # in a question: the server's facts, as far as it has them


class Answer(NamedTuple):
    """The header of a client's reply: federation, method, the client's number, and the round."""

    federation: str
    method: str
    client: int
    round: int


class Hello(NamedTuple):
    """How a client presents itself."""

    name: str  # the name for the records; "" for client-NUMBER
    size: int  # the number of training samples; 0 if the client does not report it
    losses: bool  # whether the client reports the losses of its training
    scores: bool  # whether the client reports the accuracies of its model
    form: str  # the form of its samples, `domain.form_of` as JSON without names
    digest: str = ""  # of its facts, see `handshake`


def recorded(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Returns Flower's record of named arrays [...], which messages to many clients can share."""
    record = {}
    for name, value in arrays.items():
        # Makes the same bytes as Flower's `Array(array)`, which copies large arrays several times.
        array, file = np.asarray(value), BytesIO()
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        order = "F" if array.flags.fnc else "C"  # the header's rule for `fortran_order`
        data = b"".join((file.getvalue(), array.ravel(order).view(np.uint8).data))
        record[name] = Array(str(array.dtype), array.shape, _NUMPY, data)
    return ArrayRecord(record)


def packed(
    header: Order | Answer,
    arrays: ArrayRecord | None = None,
    hello: Hello | None = None,
    scores: Mapping[str, float] | None = None,
) -> RecordDict:
    """Returns a message's content; an order without arrays (`recorded`) asks for a `Hello`."""
    content = RecordDict({_HEADER: ConfigRecord(dict(header._asdict()))})
    if arrays is not None:
        content[_ARRAYS] = arrays
    if hello is not None:
        content[_ABOUT] = ConfigRecord(dict(hello._asdict()))
    if scores is not None:
        content[SCORES] = MetricRecord({name: float(score) for name, score in scores.items()})
    return content


def record_in(content: RecordDict, kind: type[_Kind]) -> _Kind:
    """Returns the `Order`, `Answer` or `Hello` in a message; raises ValueError for others."""
    name, types = _ABOUT if kind is Hello else _HEADER, kind.__annotations__
    record = content.get(name)
    record = record if isinstance(record, ConfigRecord) else {}
    if set(record) != set(types) or any(type(record[k]) is not t for k, t in types.items()):
        raise ValueError(f"the message's {name} must hold {', '.join(types)}: use one version")
    return kind(**record)


def arrays_in(content: RecordDict, limit: int | None = None) -> dict[str, np.ndarray]:
    """Returns the arrays of a message: name -> array [...], read-only views of its bytes.

    Nothing is unpickled. Raises ValueError for another form, for more than `limit` arrays (None:
    any number), or for an array that cannot be read.
    """
    # Flower's `content.array_records` makes a reference cycle, which keeps the bytes in memory.
    names = [name for name, record in content.items() if isinstance(record, ArrayRecord)]
    if names != [_ARRAYS] or (limit is not None and len(content[_ARRAYS]) > limit):
        raise ValueError(f"the message must hold one record {_ARRAYS!r} of the method's arrays")
    arrays = {}
    for name, array in content[_ARRAYS].items():
        try:
            file = BytesIO(array.data)  # shares the bytes; `array.numpy()` would copy them
            version = np.lib.format.read_magic(file)
            shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
            # Foreign bytes of an array of objects would be used as pointers.
            if array.stype != _NUMPY or version != (1, 0) or dtype.hasobject:
                raise TypeError(f"{array.stype:.40} of {dtype} is not what numpy.save writes")
            order = "F" if by_columns else "C"
            arrays[name] = np.ndarray(shape, dtype, array.data, file.tell(), order=order)
        except Exception as error:  # NumPy's readers raise many kinds of errors on foreign bytes
            raise ValueError(f"the array {name:.80} cannot be read ({error})") from error
    return arrays


def exchange(
    grid: Grid,
    contents: Mapping[int, RecordDict],
    kind: str,
    seconds: float,
    read: Callable[[int, Reply], _Result],
    group: str = "",
) -> dict[int, _Result]:
    """Sends node -> content, messages of a `MessageType`; returns node -> `read(node, reply)`.

    A reply is an error if its bytes cannot be read, and None if it is not there after `seconds`.
    Replies are fetched one by one in the order of `contents`, so only one is in memory unless
    `read` keeps it. `group` is the round, by which Flower groups messages.
    """
    # A reply expires with its message, so the others' must outlive the wait for the first.
    life = 2 * seconds + _SESSION
    messages = [Message(x, node, kind, ttl=life, group_id=group) for node, x in contents.items()]
    message_ids = list(grid.push_messages(messages)) if messages else []
    end, names = time.monotonic() + seconds, dict(zip(contents, message_ids, strict=False))
    # No variable has a reply while the next one is fetched.
    return {node: read(node, _fetched(grid, names.get(node), end)) for node in contents}


def _fetched(grid: Grid, message: str | None, end: float) -> Reply:
    """Returns the reply to a message that was sent (None: it was not), see `exchange`."""
    while message is not None:
        try:
            for reply in grid.pull_messages([message]):
                if reply.metadata.reply_to_message_id == message:
                    return reply
        except Exception as error:  # a client chooses the bytes, and with them the error
            grid.get_nodes()  # raises an error if the connection to the SuperLink is the cause
            return error.with_traceback(None)
        if (remaining := end - time.monotonic()) <= 0:
            break
        time.sleep(min(_POLL, remaining))
    return None
