"""Clients that answer with what cannot be used, or not at all, are left out of a round."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from flwr.app import Array

from fedjax_bn.flower.messages import Answer, packed, record_in
from fedjax_bn.flower.server import serve
from fedjax_bn.flower.settings import run_of
from fedjax_bn.flower.site import load_own, save_own
from fedjax_bn.state import Own
from flower_apps import nodes_of, run_config
from flower_grid import LocalGrid


def spoilt_arrays(reply):
    """Replaces an array by an .npy whose header is not a Python literal."""
    record = reply.content.array_records["arrays"]
    record["shared/params/out/bias"] = Array(
        "float64", (3,), "numpy.ndarray", b"\x93NUMPY\x01\x00\x10\x00{'descr': (((((((\n"
    )


def of_another_method(reply):
    header = record_in(reply.content, Answer)._replace(method="scaffold")
    reply.content = packed(header, reply.content.array_records["arrays"])


WRONG = {
    "did not answer in time": None,
    "the array shared/params/out/bias cannot be read": spoilt_arrays,
    "it answers for scaffold and round 1, not for fedbn": of_another_method,
}


@pytest.mark.parametrize(
    "reason", [pytest.param(r, marks=[pytest.mark.slow] * ("scaffold" in r)) for r in WRONG]
)
def test_who_hangs_or_answers_wrongly_is_left_out_and_the_round_goes_on(folder, tmp_path, reason):
    config = run_config(tmp_path / "server", "method=fedbn,rounds=1", minimum=1, time_limit=1)
    grid = LocalGrid(nodes_of(folder, config))
    honest = grid.nodes[11]

    def spoils(message):
        reply = honest(message)
        if message.metadata.message_type == "train":
            WRONG[reason](reply)
        elif WRONG[reason] is None:
            grid.nodes[11] = None  # from now on it never answers
        return reply

    grid.nodes[11] = spoils
    _, (record,) = serve(grid, run_of(config), folder)
    assert list(record["left_out"]) == ["client-1"]
    assert reason in record["left_out"]["client-1"]
    assert np.isfinite(record["loss"]["client-0"])


def test_a_task_that_was_held_up_takes_nothing_from_one_of_a_later_round(tmp_path):
    own = Own({"params": {"scale": np.ones(2)}}, ())
    for number in (5, 7, 6):  # both began with 5
        save_own(tmp_path, number, own, 5)
    assert load_own(tmp_path, 7, own)
    save_own(tmp_path, 8, own, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "own-00000007.npz",
        "own-00000008.npz",
    ]
