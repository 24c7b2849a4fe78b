"""The loop over rounds, of which a simulation, the command and the Flower server have one each."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from fedjax_bn.training.records import Record

# `round(state) -> (state, record)`
Round = Callable[[Any], tuple[Any, Record]]


def train(
    round: Round, state: Any, *, rounds: int, records: list[Record], callbacks: Sequence[Any] = ()
) -> Any:
    """Runs the rounds that are left and returns the state after the last one.

    What happens between rounds is a callback: any object with some of the methods

        on_round_begin(round)                   before the round of this number, from 1
        on_round_end(round, state, metrics)     after it; True asks to stop here
        on_train_end(round, state, metrics)     after the last round, which may end early

    `metrics` is the round's record, a line of metrics.jsonl: a callback may add entries, which
    callbacks after it see. The next round donates the arrays of `state`, so a callback that keeps
    some copies them. A callback that is a context manager too is entered before the first round.

    The order of the callbacks is the order of writes, and a run that is killed between two of them,
    also by a power cut, continues exactly if it is this one (`run.train`):

    1. what the round's report needs, the line of the round, its events;
    2. the selected checkpoint, once the disk has all lines and events;
    3. the latest checkpoint, once the disk has the selected one too.

    So lines may be ahead of the latest checkpoint, and are then dropped, but never behind it.

    `rounds` are those of the whole run, `records` those of the rounds before `state`, to which the
    further ones are appended.
    """

    def call(hook: str, *arguments: Any) -> list[Any]:
        methods = [getattr(callback, hook, None) for callback in callbacks]
        return [method(*arguments) for method in methods if method is not None]

    with ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, AbstractContextManager):
                stack.enter_context(callback)
        stop = len(records) >= rounds
        while not stop:
            number = len(records) + 1
            call("on_round_begin", number)
            state, metrics = round(state)
            records.append(metrics)
            # Every callback sees the round, whichever asks to stop.
            answers = call("on_round_end", number, state, metrics)
            stop = number >= rounds or any(answer is True for answer in answers)
            if stop:
                call("on_train_end", number, state, metrics)
    return state
