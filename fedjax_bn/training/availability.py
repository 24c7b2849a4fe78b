"""Draws the clients of a round: who is drawn, available by a trace, and does not drop out.

A trace is a text file with a line per round of the clients that are available: numbers from 0
between commas or blanks, `3-17` for a range, `all` for all; # starts a comment, and a line with
nothing else is skipped. After its last round it starts again.
"""

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import brief
from fedjax_bn.engine.keys import stream
from fedjax_bn.training.experiment import Participation


def draw_cohort(
    participation: Participation, sizes: np.ndarray, key: jax.Array, round: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the clients of a round i32[C], in order, and which of them take part bool[C].

    The first is None for all K clients, the second if all take part. Unavailable clients are drawn
    only if too few are available. `sizes` i[K] are training samples, `round` i32[] those finished.
    """
    total = len(sizes)
    key = jax.random.fold_in(key, round)
    participates = client = None
    if (trace := participation.trace) is not None:
        bits = jnp.asarray(trace)[jnp.asarray(round, jnp.int32) % trace.shape[0]]
        participates = jnp.unpackbits(bits)[:total].astype(bool)
    if 0 < participation.drawn < total:
        if participation.draw == "by_size":
            # Sorting by log size + Gumbel noise equals drawing one by one without replacement, each
            # by its share of the samples of all clients not yet drawn.
            draws = jax.random.gumbel(stream(key, "cohort by size"), (total,))
            chances = jnp.log(jnp.asarray(sizes, draws.dtype)) + draws
            ranks = jnp.argsort(jnp.argsort(-chances)).astype(jnp.int32)
        else:
            ranks = jax.random.permutation(key, total).astype(jnp.int32)
        if participates is not None:  # unavailable clients come last
            ranks = jnp.where(participates, ranks, ranks + total)
        # Ascending, so that sums over a cohort do not depend on the order of the draws.
        client = jnp.sort(jnp.argsort(ranks)[: participation.drawn]).astype(jnp.int32)
    if participation.dropout:
        draws = jax.random.uniform(stream(key, "dropout of clients"), (total,))
        stays = draws >= participation.dropout
        participates = stays if participates is None else stays & participates
    if client is not None and participates is not None:
        participates = participates[client]
    return client, participates


def read_trace(file: str, num_clients: int) -> np.ndarray | None:
    """Returns the trace in a file as bits u8[rounds, ceil(K / 8)]; None for "".

    ConfigError: the file cannot be read, has no round, or names an unknown client.
    """
    if not file:
        return None
    try:
        rows = _rows_of(Path(os.path.expanduser(file)).read_text("utf-8-sig"), num_clients)
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.participation: trace={brief(file)}: {error}") from error
    # One bit per entry: the whole trace is on the device, and may have millions of entries.
    return np.packbits(rows, axis=1)


def _rows_of(text: str, num_clients: int) -> np.ndarray:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        row = np.zeros(num_clients, bool)
        entries = re.findall(r"[^,\s]+", line.partition("#")[0])
        for entry in entries:
            span = f"0-{num_clients - 1}" if entry == "all" else entry
            match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", span, re.ASCII)
            lowest, highest = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not lowest <= highest < num_clients:
                raise ValueError(
                    f"line {number} has {brief(entry)}: write 0 to {num_clients - 1}, 3-17 or all"
                )
            row[lowest : highest + 1] = True
        if entries:
            rows.append(row)
    if not rows:
        raise ValueError("it must have a line with clients")
    return np.stack(rows)
