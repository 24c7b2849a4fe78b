"""Draws the clients of a round: who is drawn, available by a trace, and does not drop out.

A trace file lists the clients that are available in each round. A client that is drawn but not
available, or that drops out, is in the round's cohort and takes no part. After its last round the
trace starts again. It is

- text: one line per round, with numbers of clients (from 0, in the order of the clients) between
  commas or blanks, `3-17` for a range, `all` for all; # starts a comment, and a line with nothing
  else is skipped; or
- `.npz` with `available` bool[rounds, clients].
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.files import names_in_npz, read_npz
from fedjax_bn.engine.keys import stream

_MOST_ON_DEVICE = 1000  # clients; with more, population=auto uses the host


class Participation(NamedTuple):
    """Who takes part in the rounds of a run.

    Attributes:
      drawn: clients drawn for a round; 0 for all.
      draw: "uniform", or "by_size" in proportion to their samples.
      dropout: probability that a drawn client drops out of the round.
      trace: as `read_trace` returns it.
      on_host: whether the clients' own parts are kept on the host, see `training.population`.
    """

    drawn: int = 0
    draw: str = "uniform"
    dropout: float = 0.0
    trace: np.ndarray | None = None
    on_host: bool = False


def kept_on_host(population: str, drawn: int, clients: int) -> bool:
    """Returns whether the clients' own parts are kept on the host.

    Args:
      population: the key; `auto` uses the host for more than 1000 clients if some sit out.
      drawn: clients of a round; 0 for all.
      clients: K.
    """
    large = clients > _MOST_ON_DEVICE and 0 < drawn < clients
    return population == "host" or (population == "auto" and large)


class _Cohort(NamedTuple):
    """Who is drawn for a round.

    Attributes:
      client: i32[C], their numbers in order; None for all K.
      participates: bool[C] or bool[K], which of them take part; None for all of them.
    """

    client: jax.Array | None
    participates: jax.Array | None

    def entries(self) -> dict[str, jax.Array]:
        """Returns the entries of batches for this cohort, see `fedjax_bn.engine.batches`."""
        return {} if self.participates is None else {"participates": self.participates}


def draw_cohort(
    participation: Participation, sizes: np.ndarray, key: jax.Array, round: jax.Array
) -> _Cohort:
    """Returns the clients of a round; traceable.

    Unavailable clients are drawn only if too few are available. By size, a client's probability to
    be drawn next is its share of the samples of all clients not yet drawn.

    Args:
      participation: who takes part.
      sizes: i[K], training samples of the clients.
      key: the run's, for participation.
      round: i32[], rounds finished.
    """
    total = len(sizes)
    key = jax.random.fold_in(key, round)
    available = client = None
    if participation.trace is not None:
        bits = jnp.asarray(participation.trace)[
            jnp.asarray(round, jnp.int32) % participation.trace.shape[0]
        ]
        available = jnp.unpackbits(bits)[:total].astype(bool)
    if 0 < participation.drawn < total:
        if participation.draw == "by_size":
            # Sorting by log size + Gumbel noise equals drawing one by one without replacement.
            draws = jax.random.gumbel(stream(key, "cohort by size"), (total,))
            chances = jnp.log(jnp.asarray(sizes, draws.dtype)) + draws
            ranks = jnp.argsort(jnp.argsort(-chances)).astype(jnp.int32)
        else:
            ranks = jax.random.permutation(key, total).astype(jnp.int32)
        if available is not None:  # unavailable clients come last
            ranks = jnp.where(available, ranks, ranks + total)
        # Ascending, so that sums over a cohort do not depend on the order of the draws.
        client = jnp.sort(jnp.argsort(ranks)[: participation.drawn]).astype(jnp.int32)
    participates = available
    if participation.dropout:
        stays = (
            jax.random.uniform(stream(key, "dropout of clients"), (total,)) >= participation.dropout
        )
        participates = stays if available is None else stays & available
    if client is not None and participates is not None:
        participates = participates[client]
    return _Cohort(client, participates)


def read_trace(file: str, num_clients: int) -> np.ndarray | None:
    """Returns the trace in a file, in the form above, as bits u8[rounds, ceil(K / 8)].

    Args:
      file: the file's path; if it is empty, the result is None.
      num_clients: K.

    Raises:
      ConfigError: the file cannot be read, or a round has no client or one that does not exist.
    """
    if not file:
        return None
    path, setting = Path(file).expanduser(), f"config.participation.trace={brief(file)}"
    try:
        if path.suffix == ".npz":
            rows = _read_npz(path)
        else:
            rows = _rows_of(path.read_text("utf-8-sig").splitlines(), num_clients)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{setting}: {reason}") from error
    if rows.ndim != 2 or rows.dtype != bool or rows.shape[1] != num_clients or not len(rows):
        raise ConfigError(
            f"{setting}: 'available' is {rows.dtype}{list(rows.shape)}, but it must be "
            f"bool[rounds, {num_clients}], a column for each client"
        )
    empty = np.flatnonzero(~rows.any(1))
    if len(empty):
        raise ConfigError(f"{setting}: no client is available in round {empty[0] + 1} of it")
    # One bit per entry: the whole trace is on the device, and may have millions of entries.
    return np.packbits(rows, axis=1)


def _read_npz(path: Path) -> np.ndarray:
    try:
        array_names = names_in_npz(path)
        arrays = read_npz(path, {"available"} & set(array_names))
    except ValueError as error:
        raise ValueError(f"it is damaged ({error.__cause__ or error})") from error
    if not arrays:
        raise ValueError(f"it holds {first_few(array_names)}, but no array 'available'")
    return arrays["available"]


def _rows_of(lines: Sequence[str], num_clients: int) -> np.ndarray:
    """Returns bool[rounds, K] of the lines of a text."""
    rows = []
    for number, line in enumerate(lines, 1):
        entries = re.split(r"[,\s]+", line.partition("#")[0].strip(", \t"))
        if entries == [""]:
            continue
        row = np.zeros(num_clients, bool)
        for entry in entries:
            match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", entry, re.ASCII)
            lowest, highest = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if entry == "all":
                lowest, highest = 0, num_clients - 1
            if not lowest <= highest < num_clients:
                raise ValueError(
                    f"line {number} has {brief(entry)}; write numbers of clients from 0 to "
                    f"{num_clients - 1}, ranges such as 3-17, or all"
                )
            row[lowest : highest + 1] = True
        rows.append(row)
    if not rows:
        raise ValueError("no line names a client; write a line a round, such as 0,3,5-9")
    return np.stack(rows)
