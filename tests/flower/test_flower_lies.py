"""What a client says cannot end or slow the others, and a number belongs to the key that has it."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord

from fedjax_bn.arguments.errors import ConfigError, UserError, WorkdirError
from fedjax_bn.flower.members import Members
from fedjax_bn.flower.messages import Answer, Hello, Order, arrays_in, packed, record_in, recorded
from fedjax_bn.flower.server import serve
from fedjax_bn.flower.settings import Run, run_of
from fedjax_bn.flower.site_files import load_own, save_own
from fedjax_bn.state import Own
from flower_apps import QUIET, nodes_of, run_config
from flower_grid import LocalGrid, key_of

ORDER = Order("f", "fedavg", 0, 3, 0, False)
RUN = Run(clients=3, time_limit=1.0, size_bound=1000)
FORM = '{"num_classes": 3, "shape": [6], "dtype": "uint8", "mean": [0.5], "std": [0.5]}'
HELLO = Hello("one", 9, True, True, FORM)


def saying(client, hello=HELLO, change=None):
    """A node that says who it is."""

    def answer(message):
        content = packed(Answer("f", "fedavg", client, 0), hello=hello)
        if change:
            change(content)
        return Message(content, reply_to=message)

    return answer


def met(nodes, keys=(), run=RUN, place=Path("none")):
    """The members that a server has after it has met some nodes."""
    grid = LocalGrid(nodes)
    grid.keys |= dict(keys)
    members = Members(grid, run, place)
    members.meet(ORDER)
    return members


# The fingerprints that the server shows of nodes 10, 11 and 12.
PRINTS = [*met({10 + k: saying(k) for k in range(3)}).keys.values()]


def about(**entries):
    return lambda content: content["about"].update(entries)


HUGE = "é\n\u202e" * 400_000


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (saying(0, HELLO._replace(size=2**31 - 1)), "size-bound"),
        (saying(0, HELLO._replace(size=-1)), "-1 samples"),
        (saying(0, change=about(size=True)), "the message's about must hold"),
        (saying(0, change=about(size=9.0)), "the message's about must hold"),
        (saying(-1), "client -1 with"),
        (saying(True), "the message's header must hold"),
        *(
            (saying(0, HELLO._replace(form=form)), "no samples have the form")
            for form in (
                HUGE,
                "[" * 10**6,
                "[]",
                "{}",
                FORM.replace("[6]", "[999999, 999999]"),
                FORM.replace("[6]", "[1e400]"),
                FORM.replace("[6]", "[6.0]"),
                FORM.replace("3", "2147483647", 1),
                FORM.replace("3", "true", 1),
                FORM.replace("}", ', "boxes": 2147483647}'),
                FORM.replace("}", ', "masks": ["mask"]}'),
                FORM.replace("}", ', "classes": [1, 2, 3]}'),
            )
        ),
        (saying(0, change=lambda c: c.pop("about")), "message's about"),
        (saying(0, change=lambda c: c.update(header=MetricRecord())), "message's header"),
        (lambda message: Message(Error(3, HUGE), reply_to=message), "it failed: "),
        (ValueError("bytes that Flower cannot read"), "its reply cannot be read: bytes"),
    ],
)
def test_a_hello_that_cannot_be_used_leaves_its_node_out_and_no_other(said, why):
    members = met({10: said, 11: saying(1)})
    assert list(members.connected) == [1]
    ((node, reason),) = members.refused.items()
    assert node == f"node 10 {PRINTS[0]}"
    assert why in reason
    assert len(reason) <= 500


def test_names_are_cut_and_made_unique_and_who_is_gone_keeps_its_size():
    names = ("hospital", "hospital", "mean")
    members = met({10 + k: saying(k, HELLO._replace(name=name)) for k, name in enumerate(names)})
    assert [*map(members.name, range(3))] == ["hospital", "hospital-1", "mean-2"]
    del members.grid.nodes[10]
    members.meet(ORDER)
    assert list(members.connected) == [1, 2]
    assert members.sizes == {0: 9, 1: 9, 2: 9}
    name = met({10: saying(0, HELLO._replace(name=HUGE))}).name(0)
    assert len(name) <= 80
    assert name.isprintable()


def test_a_number_belongs_to_the_first_key_and_the_bindings_survive_a_restart(tmp_path):
    members = met({10: saying(0), 11: saying(1)}, place=tmp_path)
    members.save()
    stored = json.loads((tmp_path / "clients.json").read_text())
    assert stored["0"] == {"name": "one", "key": PRINTS[0], "size": 9}
    assert stored["2"] == {"name": "client-2", "key": ""}
    again = Members(LocalGrid({}), RUN, tmp_path)
    assert (again.keys, again.sizes) == (members.keys, members.sizes)
    # Client 0 is away, and others claim its number, or a second one.
    liars = met({12: saying(0), 11: saying(2)}, place=tmp_path)
    assert not liars.connected
    assert f"client 0, which is bound to {PRINTS[0]}" in liars.refused[f"node 12 {PRINTS[2]}"]
    assert f"{PRINTS[1]}, which is bound to clients [1]" in liars.refused[f"node 11 {PRINTS[1]}"]
    # It comes back as another node, and keeps its name whatever it says.
    back = met({13: saying(0, HELLO._replace(name="two"))}, {13: key_of(10)}, place=tmp_path)
    assert back.connected
    assert back.name(0) == "one"


def test_rounds_without_the_names_of_their_clients_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"round": 1, "loss": {}, "weights": {}, "seconds": 1}\n'
    )
    with pytest.raises(WorkdirError, match=r"clients\.json"):
        Members(LocalGrid({}), RUN, tmp_path)


def test_a_list_of_keys_or_none_can_be_asked_for():
    listed = RUN._replace(client_keys=",".join(PRINTS))
    assert list(met({11: saying(0), 10: saying(1), 12: saying(2)}, run=listed).connected) == [2]
    assert met({11: saying(0)}, run=RUN._replace(client_keys="any")).connected
    for wrong in ("some", ",".join(PRINTS[:2]), ",".join(PRINTS[:1] * 3), f"{PRINTS[0]},a,b"):
        with pytest.raises(ConfigError, match="client-keys="):
            run_of({"config": "quickstart", "clients": 3, "client-keys": wrong})
    keys = {11: b"random bytes, as in Flower's simulation"}
    assert met({11: saying(0)}, keys).keys == {}
    assert not met({11: saying(0)}, keys, listed).connected


PEM = b"""-----BEGIN PUBLIC KEY-----
MHYwEAYHKoZIzj0CAQYFK4EEACIDYgAECyOMHBt3S127p2DpOqAvCHgGNdy64n08
TMOhayYi/XVp2b9UHcsXnqzrOT5bVYAZcj+aLw2uPWlumoa7FO0iuZTRKgrMD7QN
ExgujKieX1UnvZ0Mjx3V79qSjwMvhWo+
-----END PUBLIC KEY-----
"""


def test_a_fingerprint_is_that_which_ssh_keygen_shows():
    shown = "SHA256:VZlotmmfX8U7Swl4csy3bHCcekmyZ71M5t6/gboItXU"
    assert met({10: saying(0)}, {10: PEM}).keys == {0: shown}


def arrays_of(reply):
    return arrays_in(reply.content), record_in(reply.content, Answer)


def changed(**changes):
    """A lie that changes arrays of an honest answer."""

    def lie(reply, old):
        arrays, header = arrays_of(reply)
        arrays |= {name.replace("__", "/"): change(arrays) for name, change in changes.items()}
        reply.content = packed(header, recorded(arrays))

    return lie


def again(reply, old):
    reply.content = old.content


def many(reply, old):
    one = Array(np.zeros(()))
    reply.content["arrays"] = ArrayRecord({f"x{k}": one for k in range(20_000)})


def no_arrays(reply, old):
    reply.content["arrays"] = ConfigRecord({"x": "y"})


def spoilt_arrays(reply, old):
    """Replaces an array by an .npy whose header is not a Python literal."""
    record = reply.content.array_records["arrays"]
    record["shared/params/out/bias"] = Array(
        "float64", (3,), "numpy.ndarray", b"\x93NUMPY\x01\x00\x10\x00{'descr': (((((((\n"
    )


def of_another_method(reply, old):
    header = record_in(reply.content, Answer)._replace(method="scaffold")
    reply.content = packed(header, reply.content.array_records["arrays"])


BIAS = "shared/params/out/bias"
LIES = [
    ("round 1, not for fedbn and round 2", again),
    ("is not finite", changed(shared__params__out__bias=lambda x: x[BIAS] * np.nan)),
    ("is float64[8000000]", changed(shared__params__out__bias=lambda x: np.zeros(8_000_000))),
    ("is complex128", changed(shared__params__out__bias=lambda x: x[BIAS] * 1j)),
    ("norm of its update", changed(shared__params__out__bias=lambda x: x[BIAS] + 1e300)),
    ("one record 'arrays'", many),
    ("one record 'arrays'", no_arrays),
    ("the array shared/params/out/bias cannot be read", spoilt_arrays),
    ("it answers for scaffold and round 10, not for fedbn", of_another_method),
    ("did not answer in time", None),
]


@pytest.mark.slow
def test_who_lies_or_hangs_is_left_out_and_the_rounds_go_on(folder, tmp_path):
    """Client 1 trains a round, and then lies in each."""
    changes = f"method=fedbn,rounds={1 + len(LIES)}"
    config = run_config(tmp_path / "server", changes, minimum=1, time_limit=1)
    grid = LocalGrid(nodes_of(folder, config))
    honest, lies, first = grid.nodes[11], [lie for _, lie in LIES], []

    def spoils(message):
        reply = honest(message)
        if message.metadata.message_type != "train":
            return reply
        if first:
            lies.pop(0)(reply, first[0])
        first.append(Message(reply.content, reply_to=message))
        if not lies[0]:
            grid.nodes[11] = None  # from now on it never answers
        return reply

    grid.nodes[11] = spoils
    _, records = serve(grid, run_of(config), folder)
    assert "left_out" not in records[0]
    for record, (reason, _) in zip(records[1:], LIES, strict=True):
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


def test_two_clients_of_different_forms_write_nothing(folder, tmp_path):
    config = run_config(tmp_path / "server", "method=fedavg", time_limit=0.1)
    grid = LocalGrid(nodes_of(folder, config, report=QUIET))
    honest = grid.nodes[11]

    def lies(message):
        said = record_in(honest(message).content, Hello)
        form = said.form.replace('"num_classes": 3', '"num_classes": 4')
        header = record_in(message.content, Order)
        answer = Answer(header.federation, "fedavg", 1, 0)
        return Message(packed(answer, hello=said._replace(form=form)), reply_to=message)

    grid.nodes[11] = lies
    with pytest.raises(ConfigError, match="no form"):
        serve(grid, run_of(config), folder)
    assert not (tmp_path / "server" / "config.json").exists()
    del grid.nodes[11]
    with pytest.raises(UserError, match="1 of 2 clients"):
        serve(grid, run_of(config), folder)
