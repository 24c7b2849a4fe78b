"""Several processes as one run: what the first does for all, and the end of all where one is lost.

All compute; process 0 alone writes to the workdir and says what there is to say. What only it can
know, such as what the workdir holds, the others learn from it (`by_first`), its faults too. Every
process says every few seconds that it is there, so that none waits for one that is not: where one
falls silent or fails, the others end with a sentence, and the same command goes on.

They talk through the service of `jax.distributed`, which needs no device.
"""

import functools
import itertools
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import jax

from fedjax_bn.run import errors
from fedjax_bn.run.processes import stop
from fedjax_bn.run.processes.coordinator import abort_late, reach

_EVERY, _SILENCE, _GRACE = 2.0, 30.0, 4.0  # seconds
_FOREVER = 10**9  # milliseconds: who waits is ended by `_watch`
# How XLA's errors begin; JAX raises some of them as ValueError.
_OF_XLA = re.compile("(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): ")
_turns = itertools.count()
_leaving = threading.Event()
_answered = threading.Event()  # the service did, since `_mind_first` looked last


def first() -> bool:
    """Whether this is process 0, perhaps the only one."""
    return _service().process_id == 0


def number() -> str:
    """ " (process 1 of 2)", or nothing where there is one."""
    service = _service()
    return f" (process {service.process_id} of {service.num_processes})" if _several() else ""


def by_first(act: Callable[[], Any]) -> Any:
    """What process 0 does and all learn.

    Args:
      act: called in process 0 alone; returns what JSON can write.

    Returns:
      What it returned there.

    Raises:
      UserError: as `act`, in all processes.
    """
    if not _several():
        return act()
    key = f"fedjax_bn/turn/{next(_turns)}"
    if not first():
        told = json.loads(_store().blocking_key_value_get(key, _FOREVER))
        if "error" in told:
            raise getattr(errors, told["error"])(told["text"])
        return told["value"]
    try:
        value = act()
    except errors.UserError as error:
        told = {"error": type(error).__name__, "text": str(error)}
        _store().key_value_set(key, json.dumps(told))
        raise
    _store().key_value_set(key, json.dumps({"value": value}))
    return value


@contextmanager
def held_by_first(context: AbstractContextManager[None]) -> Iterator[None]:
    """A context that process 0 alone enters, and in which all are once it has."""
    with ExitStack() as stack:
        by_first(lambda: stack.enter_context(context))
        yield


def any_asked(stop: bool) -> bool:
    """Whether any process was asked to stop; `stop`: whether this one was."""
    if not _several():
        return stop
    if stop:
        _store().key_value_set(_named("stop"), "", allow_overwrite=True)
    return by_first(lambda: bool(_store().key_value_dir_get("fedjax_bn/stop/")))


def require_same(what: str, value: Any) -> None:
    """Raises ConfigError where this process has another value than process 0.

    All processes must call it, in the same order.

    Args:
      what: the value's name in the error.
      value: anything that JSON can hold.
    """
    mine = json.dumps(value, sort_keys=True)
    if by_first(lambda: mine) != mine:
        raise errors.ConfigError(
            f"{what} of this process is not that of process 0: give all the same command, and let "
            "them read the same files"
        )


def watch() -> None:
    """Begins to say that this process is there, and to look after the others."""
    if _several():
        abort_late()
        threading.Thread(target=_watch, daemon=True).start()
    if _several() and not first():
        threading.Thread(target=_mind_first, daemon=True).start()


def _watch() -> None:
    """Ends this process where another one has failed, or has said nothing for long."""
    began = time.monotonic()
    # Also of a process that is lost before it says so for the first time.
    heard = {_named("there", number): ("", began) for number in range(_service().num_processes)}
    for beat in itertools.count():
        now = time.monotonic()
        if _leaving.is_set() or not _several():  # the run is at its end
            return
        try:
            _store().key_value_set(_named("there"), str(beat), allow_overwrite=True)
            there = dict(_store().key_value_dir_get("fedjax_bn/there/"))
            ended = dict(_store().key_value_dir_get("fedjax_bn/ended/"))
            _answered.set()
        except Exception:  # the service is a part of process 0, see `_mind_first`
            there, ended = {}, {}
        for key, text in there.items():
            if heard[key][0] != text:
                heard[key] = text, now
        for key, why in ended.items():
            time.sleep(_GRACE)  # this one may be failing by itself, as it has
            _lose(int(key.rpartition("/")[2]), f"it ended ({why})")
        for key, (_, moment) in heard.items():
            if now - moment > _SILENCE:
                _lose(int(key.rpartition("/")[2]), f"silent for {_SILENCE:.0f} s")
        time.sleep(_EVERY)


def _mind_first() -> None:
    """Ends this process where process 0 is gone, and with it the service: `_watch` waits for that.

    Then nobody listens at its address. One that listens and does not answer is silent.
    """
    answered = time.monotonic()
    while True:
        if _answered.wait(_EVERY + 1):
            _answered.clear()
            answered = time.monotonic()
            continue
        if _leaving.is_set() or not _several():
            return
        gone = False
        try:
            reach(_service().coordinator_address)
        except OSError as error:
            gone = not isinstance(error, TimeoutError)
        if gone or time.monotonic() - answered > _SILENCE:
            _lose(0, "it does not answer", service=False)


def _lose(process: int, why: str, *, service: bool = True) -> None:
    """Ends this process at once, because another one is lost; `service`: whether it answers."""
    if _leaving.is_set():
        return
    if service:
        with suppress(Exception):
            _store().key_value_set(_named("ended"), why, allow_overwrite=True)
    stop.end(f"process {process} of {_service().num_processes} is lost, {why}", 1)


@contextmanager
def together() -> Iterator[None]:
    """A context in which no process is left behind by one that fails."""
    try:
        yield
    except Exception as error:
        if not _several():
            raise
        if _may_be_of_another(error):
            time.sleep(_SILENCE + 2 * _EVERY)  # in which `_watch` finds out who is lost
        if isinstance(error, errors.UserError):
            raise
        traceback.print_exc()
        leave(1, f"{type(error).__name__}: {error}")


def _may_be_of_another(error: BaseException | None) -> bool:
    """Whether what failed, or is behind it, may be a transfer to a process that is lost."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError | TimeoutError):
            return True
        if _OF_XLA.match(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave(status: int, why: str) -> None:
    """Ends this process for a fault, after the others know; alone it does nothing.

    The way out of `jax.distributed` would wait for those that wait for this one.
    """
    if not _several():
        return
    _leaving.set()
    with suppress(Exception):
        _store().key_value_set(_named("ended"), why, allow_overwrite=True)
        end = time.monotonic() + 3 * _GRACE
        # Process 0 goes last: with it goes the service.
        while first() and time.monotonic() < end:
            if len(_store().key_value_dir_get("fedjax_bn/ended/")) == _service().num_processes:
                break
            time.sleep(0.1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _named(kind: str, process: int | None = None) -> str:
    """The key of what a process says, by default this one."""
    return f"fedjax_bn/{kind}/{_service().process_id if process is None else process}"


def _several() -> bool:
    return _service().client is not None and _service().num_processes > 1


def _store() -> Any:
    return _service().client


@functools.cache
def _service() -> Any:
    """What `jax.distributed` knows; its key-value store has no public name."""
    from jax._src.distributed import global_state

    return global_state
