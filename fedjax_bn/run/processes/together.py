"""Several processes as one run: what process 0 does for all, and how a process ends that fails.

All compute; process 0 alone writes to the workdir and prints. The others learn from it what only
it can know, such as what the workdir holds (`by_first`), and its errors too. They talk through
collectives of their devices (`multihost_utils`). A process that fails ends at once; where one is
lost, a collective fails in the others, or JAX ends them for want of a heartbeat. The same command
continues from the last checkpoint.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_bn.run import errors
from fedjax_bn.run.processes import stop

_GRACE = 4.0  # seconds that the others have to end before process 0 does


def first() -> bool:
    """Returns whether this is process 0, perhaps the only one."""
    return not _several() or jax.process_index() == 0


def number() -> str:
    """Returns " (process 1 of 2)", or nothing where there is one."""
    return f" (process {jax.process_index()} of {jax.process_count()})" if _several() else ""


def by_first(act: Callable[[], Any]) -> Any:
    """Calls a function in process 0 and returns its result in all processes.

    All processes must call it, in the same order, outside of other threads.

    Args:
      act: returns what JSON can write.

    Raises:
      UserError: as `act`, in all processes.
    """
    if not _several():
        return act()
    result: dict[str, Any] = {}
    if first():
        try:
            result = {"value": act()}
        except errors.UserError as error:
            result = {"error": type(error).__name__, "text": str(error)}
    result = json.loads(_of_first(json.dumps(result).encode()))
    if "error" in result:
        raise getattr(errors, result["error"])(result["text"])
    return result["value"]


def _of_first(content: bytes) -> bytes:
    """The bytes that process 0 has."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    # A few sizes only, for each of which a program is compiled.
    row = np.zeros(max(256, 1 << (size - 1).bit_length()), np.uint8)
    if first():
        row[:size] = np.frombuffer(content, np.uint8)
    return multihost_utils.broadcast_one_to_all(row)[:size].tobytes()


@contextmanager
def held_by_first(context: AbstractContextManager[None]) -> Iterator[None]:
    """A context that process 0 alone enters, and in which all are once it has."""
    with ExitStack() as stack:
        by_first(lambda: stack.enter_context(context))
        yield


def any_asked(stop: bool) -> bool:
    """Returns whether any process was asked to stop; `stop`: whether this one was."""
    return bool(multihost_utils.process_allgather(np.asarray(stop)).any()) if _several() else stop


def require_same(what: str, value: Any) -> None:
    """Raises ConfigError in all processes where one has another value than process 0.

    All processes must call it, in the same order.

    Args:
      what: the value's name in the error.
      value: anything that JSON can hold.
    """
    if not _several():
        return
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    if others := [i for i, row in enumerate(digests) if (row != digests[0]).any()]:
        raise errors.ConfigError(
            f"{what} of process {others[0]} is not that of process 0: give all the same command, "
            "and let them read the same files"
        )


@contextmanager
def together() -> Iterator[None]:
    """A context in which an error ends this process at once, so that none waits for it."""
    try:
        yield
    except errors.UserError:
        raise  # `main.fail` says it, and leaves
    except Exception:
        if not _several():
            raise
        traceback.print_exc()
        _go_last()
        stop.end(f"this process failed, or one that it waited for is lost{number()}", 1)


def leave(status: int) -> None:
    """Ends this process for a fault; alone it does nothing.

    The way out of `jax.distributed` would wait for those that wait for this one.
    """
    if _several():
        _go_last()
        os._exit(status)


def _go_last() -> None:
    """Lets process 0 end last: as soon as its service is gone, JAX aborts the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    if first():
        time.sleep(_GRACE)


def _several() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1
