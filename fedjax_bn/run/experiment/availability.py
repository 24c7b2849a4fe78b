"""Who takes part in a round: drawn, available by a trace, and not dropped out.

A trace file says which clients are available in each round; a client that is drawn and not
available, or that drops out, is in the round's cohort and takes no part. A round behind the last
one of a trace begins it again. It is

- text: a line a round, numbers of clients (from 0, in the order of the clients) between commas or
  blanks, `3-17` for a range, `all` for all; what follows # is a comment, and a line that holds
  nothing else is no round; or
- `.npz` with `available` bool[rounds, clients].
"""

import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.arguments.text import brief
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.regular_files import Refused, read_text
from fedjax_bn.data.sets.arrays import names_in_npz, read_npz
from fedjax_bn.engine.keys import stream
from fedjax_bn.run.errors import ConfigError

# What the key of a round is folded with: not by 0 and 1, into which a permutation splits its key.


class Cohort(NamedTuple):
    """Who is drawn for a round.

    Attributes:
      client: i32[C], their numbers in order; None for all K.
      participates: bool[C] or bool[K], who of them takes part; None for all of them.
    """

    client: jax.Array | None
    participates: jax.Array | None

    def entries(self) -> dict[str, jax.Array]:
        """What of it batches hold, see `fedjax_bn.engine.batches`."""
        return {} if self.participates is None else {"participates": self.participates}


def draw_cohort(
    config: ConfigDict,
    trace: np.ndarray | None,
    sizes: np.ndarray,
    key: jax.Array,
    round: jax.Array,
) -> Cohort:
    """The clients of a round; traceable.

    Clients that are not available are drawn only where there are too few others. By size, the
    chance of the next one is its share of the samples of those not yet drawn.

    Args:
      config: the run's.
      trace: as `read_trace` returns it.
      sizes: i[K], training samples of the clients.
      key: the run's, for participation.
      round: i32[], rounds finished.
    """
    total, wanted, draw = len(sizes), config.clients_per_round, config.participation
    key = jax.random.fold_in(key, round)
    available = None if trace is None else _unpacked(trace, total, round)
    client = None
    if 0 < wanted < total:
        ranks = _ranks(key, sizes, by_size=draw.draw == "by_size")
        if available is not None:
            ranks = jnp.where(available, ranks, ranks + total)
        client = jnp.sort(jnp.argsort(ranks)[:wanted]).astype(jnp.int32)
    participates = available
    if draw.dropout:
        stays = jax.random.uniform(stream(key, "dropout of clients"), (total,)) >= draw.dropout
        participates = stays if available is None else stays & available
    if client is not None and participates is not None:
        participates = participates[client]
    return Cohort(client, participates)


def _ranks(key: jax.Array, sizes: np.ndarray, by_size: bool) -> jax.Array:
    """i32[K]: a random order of all clients."""
    if not by_size:
        return jax.random.permutation(key, len(sizes)).astype(jnp.int32)
    # The order of log size + Gumbel is that of draws one after the other, without replacement.
    draws = jax.random.gumbel(stream(key, "cohort by size"), (len(sizes),))
    chances = jnp.log(jnp.asarray(sizes, draws.dtype)) + draws
    return jnp.argsort(jnp.argsort(-chances)).astype(jnp.int32)


def _unpacked(trace: np.ndarray, total: int, round: jax.Array) -> jax.Array:
    """bool[K]: who is available in a round."""
    bits = jnp.asarray(trace)[jnp.asarray(round, jnp.int32) % trace.shape[0]]
    return jnp.unpackbits(bits)[:total].astype(bool)


def read_trace(text: str, num_clients: int) -> np.ndarray | None:
    """The trace in a file, u8[rounds, ceil(K / 8)] of bits, as the module describes it.

    Args:
      text: the file's path; None is returned for an empty one.
      num_clients: K.

    Raises:
      ConfigError: it cannot be read, or names nobody or a client that is not there.
    """
    if not text:
        return None
    path, what = Path(text).expanduser(), f"config.participation.trace={brief(text)}"
    try:
        rows = _read_npz(path) if path.suffix == ".npz" else _read_lines(path, num_clients)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{what}: {reason}") from error
    if rows.ndim != 2 or rows.dtype != bool or rows.shape[1] != num_clients or not len(rows):
        raise ConfigError(
            f"{what}: 'available' is {rows.dtype}{list(rows.shape)}, but it must be bool[rounds, "
            f"{num_clients}], a column for each client"
        )
    empty = np.flatnonzero(~rows.any(1))
    if len(empty):
        raise ConfigError(f"{what}: nobody is available in round {empty[0] + 1} of it")
    return np.packbits(rows, axis=1)


def _read_npz(path: Path) -> np.ndarray:
    try:
        there = names_in_npz(path)
        arrays = read_npz(path, {"available"} & set(there))
    except Refused:
        raise
    except ValueError as error:
        raise ValueError(f"it is damaged ({error.__cause__ or error})") from error
    if not arrays:
        raise ValueError(f"it holds {first_few(there)}, but no array 'available'")
    return arrays["available"]


def _read_lines(path: Path, num_clients: int) -> np.ndarray:
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        entries = re.split(r"[,\s]+", line.partition("#")[0].strip(", \t"))
        if entries == [""]:
            continue
        row = np.zeros(num_clients, bool)
        for entry in entries:
            start, end = _range_of(entry, num_clients, number)
            row[start : end + 1] = True
        rows.append(row)
    if not rows:
        raise ValueError("no line names a client; write a line a round, such as 0,3,5-9")
    return np.stack(rows)


def _range_of(entry: str, num_clients: int, line: int) -> tuple[int, int]:
    """The first and last client that an entry of a line means."""
    if entry == "all":
        return 0, num_clients - 1
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", entry, re.ASCII)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not first <= last < num_clients:
        raise ValueError(
            f"line {line} has {brief(entry)}; write numbers of clients from 0 to "
            f"{num_clients - 1}, ranges such as 3-17, or all"
        )
    return first, last
