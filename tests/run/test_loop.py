"""The loop over rounds: when callbacks are called, what they see, and when it ends."""

import signal
import types

import pytest

from fedjax_bn.training.callbacks.evaluation import StopRequests
from fedjax_bn.training.loop import train


class Watcher:
    """A callback with every hook, which asks to stop in one round."""

    def __init__(self, calls, name, stop=0):
        self.calls, self.name, self.stop = calls, name, stop

    def __enter__(self):
        self.calls.append((self.name, "enter"))

    def __exit__(self, *error):
        self.calls.append((self.name, "exit"))

    def on_round_begin(self, round):
        self.calls.append((self.name, "begin", round))

    def on_round_end(self, round, state, metrics):
        self.calls.append((self.name, "end", round, state, dict(metrics)))
        metrics[self.name] = round
        return round == self.stop

    def on_train_end(self, round, state, metrics):
        self.calls.append((self.name, "last", round))


def count(state):
    return state + 1, {"round": state + 1}


def test_callbacks_are_called_in_order_and_see_what_others_added():
    calls, records, states = [], [{"round": 1}], []
    only_end = types.SimpleNamespace(on_round_end=lambda round, state, _: states.append(state))
    callbacks = [Watcher(calls, "a"), Watcher(calls, "b", stop=2), only_end]
    assert train(count, 1, rounds=5, records=records, callbacks=callbacks) == 2
    assert calls == [
        *(("a", "enter"), ("b", "enter"), ("a", "begin", 2), ("b", "begin", 2)),
        ("a", "end", 2, 2, {"round": 2}),
        ("b", "end", 2, 2, {"round": 2, "a": 2}),
        *(("a", "last", 2), ("b", "last", 2), ("b", "exit"), ("a", "exit")),
    ]
    assert records == [{"round": 1}, {"round": 2, "a": 2, "b": 2}]
    assert states == [2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_round_and_acts_as_usual_afterwards(number):
    stop = StopRequests()
    usual = signal.signal(number, signal.default_int_handler)  # under nohup it is ignored

    def interrupted(state):
        if state == 1:
            signal.raise_signal(number)
        return count(state)

    assert train(interrupted, 0, rounds=5, records=[], callbacks=[stop]) == 2
    assert stop.asked
    assert signal.signal(number, usual) is signal.default_int_handler
