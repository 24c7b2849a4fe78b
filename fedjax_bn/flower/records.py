"""What travels in a Flower message: one record of named arrays, and a short header."""

from collections.abc import Mapping
from io import BytesIO
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

_ARRAYS, _HEADER, _SCORES, _ABOUT = "arrays", "header", "scores", "about"
_NUMPY = "numpy.ndarray"  # Flower's name of bytes that `numpy.save` writes
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Order(NamedTuple):
    """The header of what the server asks a client for.

    Attributes:
      federation: which one it is; what a client keeps is kept for one federation.
      method: the configured method's name.
      begin: rounds finished when the server last took an upload of this client, whose own part
        of then it begins with.
      population: K, how many clients there are in all.
      longest, smallest: samples of the largest and the smallest client, on which the order of
        samples depends; 0 where a client keeps them to itself.
      serve_unseen: whether its personal leaves are asked for.
    """

    federation: str
    method: str
    begin: int
    population: int
    longest: int
    smallest: int
    serve_unseen: bool


class Answer(NamedTuple):
    """The header of a client's reply: to whose order it answers, and who it is."""

    federation: str
    method: str
    client: int


def recorded(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Arrays in Flower's form, which messages to many clients share: one copy, hashed once.

    Args:
      arrays: name -> array [...], any dtype that `numpy.save` writes.
    """
    return ArrayRecord({name: _written(np.asarray(array)) for name, array in arrays.items()})


def _written(array: np.ndarray) -> Array:
    """The array in Flower's form, byte for byte; `Array(array)` copies large ones several times."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    order = "F" if array.flags.fnc else "C"  # as the header says
    data = b"".join((header.getvalue(), array.ravel(order).view(np.uint8).data))
    return Array(str(array.dtype), array.shape, _NUMPY, data)


def _read(array: Array) -> np.ndarray:
    """A view of a message's bytes, which `array.numpy()` copies; raises as that does."""
    if array.stype != _NUMPY:
        raise TypeError(f"its form is {array.stype:.40}, not {_NUMPY}")
    file = BytesIO(array.data)  # shares the bytes
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"its header is of version {version}")
    shape, by_columns, dtype = _HEADERS[version](file)
    if dtype.hasobject:  # whose bytes would be taken for addresses
        raise ValueError(f"it holds objects, {dtype}")
    return np.ndarray(shape, dtype, array.data, file.tell(), order="F" if by_columns else "C")


def packed(arrays: ArrayRecord, header: Order | Answer) -> RecordDict:
    """The content of a message.

    Args:
      arrays: as `recorded` makes them.
      header: who asks for what, or who answers.
    """
    return RecordDict({_ARRAYS: arrays, _HEADER: ConfigRecord(dict(header._asdict()))})


def arrays_in(content: RecordDict) -> dict[str, np.ndarray]:
    """The arrays of a message, by name.

    Args:
      content: as `packed` makes it.

    Returns:
      name -> array [...], without pickle, a read-only view of the message's bytes.

    Raises:
      ValueError: the message is none of ours, or an array cannot be read.
    """
    if set(content.array_records) != {_ARRAYS}:
        raise ValueError(
            f"the message holds records of arrays called {sorted(content.array_records)}, not one "
            f"called {_ARRAYS!r}: the other side is another app"
        )
    found = {}
    for name, array in content.array_records[_ARRAYS].items():
        try:
            found[name] = _read(array)
        except Exception as error:  # bytes of another's making; NumPy's readers raise many kinds
            raise ValueError(f"the array {name:.80} cannot be read ({error})") from error
    return found


def order_in(content: RecordDict) -> Order:
    """The header of the server's message.

    Raises:
      ValueError: it has none, or one with other entries.
    """
    return _record_of(content, _HEADER, Order)


def answer_in(content: RecordDict) -> Answer:
    """The header of a client's reply.

    Raises:
      ValueError: as `order_in`.
    """
    return _record_of(content, _HEADER, Answer)


class Hello(NamedTuple):
    """What a client says of itself.

    Attributes:
      name: what it wants to be called; "" for its number.
      size: of its training samples; 0 where it keeps that to itself.
      losses: whether it tells the losses of its training.
      scores: whether it tells the accuracies of its model.
      form: of its samples, `domain.form_of` as JSON without names.
    """

    name: str
    size: int
    losses: bool
    scores: bool
    form: str


def asking(header: Order) -> RecordDict:
    """The content of the server's question who a client is: the header, and no arrays."""
    return RecordDict({_HEADER: ConfigRecord(dict(header._asdict()))})


def with_hello(hello: Hello, header: Answer) -> RecordDict:
    """The content of a client's reply to that: `hello` as a record, and no arrays."""
    about = ConfigRecord(dict(hello._asdict()))
    return RecordDict({_ABOUT: about, _HEADER: ConfigRecord(dict(header._asdict()))})


def hello_in(content: RecordDict) -> Hello:
    """What a client says of itself in a reply's content.

    Raises:
      ValueError: it says nothing, or something of another form.
    """
    return _record_of(content, _ABOUT, Hello)


def with_scores(scores: Mapping[str, float], header: Answer) -> RecordDict:
    """The content of a reply that tells scores only.

    Args:
      scores: name -> percent.
      header: who answers.
    """
    record = MetricRecord({name: float(score) for name, score in scores.items()})
    return RecordDict({_SCORES: record, _HEADER: ConfigRecord(dict(header._asdict()))})


def scores_in(content: RecordDict) -> dict[str, float]:
    """What `with_scores` told, name -> percent; empty where it told none.

    Raises:
      ValueError: a score is not finite.
    """
    record = content.metric_records.get(_SCORES, {})
    if not all(isinstance(x, int | float) and np.isfinite(x) for x in record.values()):
        raise ValueError("a reported score is no finite number")
    return {name: float(x) for name, x in record.items()}


def _record_of(content: RecordDict, name: str, kind: type) -> NamedTuple:
    """The record of that name as a NamedTuple; ValueError where it has other entries."""
    record, types = content.config_records.get(name, {}), kind.__annotations__
    if set(record) != set(types) or any(type(record[k]) is not t for k, t in types.items()):
        raise ValueError(
            f"the message's {name} must hold {', '.join(types)}, but it holds "
            f"{', '.join(sorted(record)) or 'nothing'}: the other side has another version"
        )
    return kind(**record)
