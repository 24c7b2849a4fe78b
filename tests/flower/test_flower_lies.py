"""What a client says cannot end or slow the others, and a number belongs to the key that has it."""

import json
import subprocess
import time

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord

import runs
from fedjax_bn.arguments.errors import ConfigError, WorkdirError
from fedjax_bn.flower.members import Met, meet, read_clients, write_clients
from fedjax_bn.flower.messages import (
    Answer,
    Hello,
    Order,
    arrays_in,
    packed,
    record_in,
    recorded,
    scores_in,
)
from fedjax_bn.flower.server import TooFewError, serve
from fedjax_bn.flower.settings import Run, run_of
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


def prints_of(numbers=(10, 11, 12), **keys):
    """The fingerprints that the server shows of nodes which present themselves as 0, 1, 2."""
    grid = LocalGrid({number: saying(k) for k, number in enumerate(numbers)})
    grid.keys |= {int(number[1:]): key for number, key in keys.items()}
    return [*meet(grid, Met(), ORDER, RUN).keys.values()]


PRINTS = prints_of()


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
        (saying(0, HELLO._replace(form=HUGE)), "is not a JSON object"),
        (saying(0, HELLO._replace(form="[" * 10**6)), "is not a JSON object"),
        (saying(0, HELLO._replace(form="[]")), "is not a JSON object"),
        (saying(0, HELLO._replace(form="{}")), "no samples have the form"),
        (saying(0, HELLO._replace(form=FORM.replace("[6]", "[999999, 999999]"))), "(shape)"),
        (saying(0, HELLO._replace(form=FORM.replace("3", "2147483647", 1))), "(num_classes)"),
        (saying(0, HELLO._replace(form=FORM.replace("[6]", "[1e400]"))), "(shape)"),
        (saying(0, change=lambda c: c.pop("about")), "but it holds nothing"),
        (saying(0, change=lambda c: c.update(header=MetricRecord())), "but it holds nothing"),
        (lambda message: Message(Error(3, HUGE), reply_to=message), "it failed: "),
        (ValueError("bytes that Flower cannot read"), "its reply cannot be read: bytes"),
    ],
)
def test_a_hello_that_cannot_be_used_leaves_its_node_out_and_no_other(said, why):
    grid = LocalGrid({10: said, 11: saying(1)})
    met = meet(grid, Met(), ORDER, RUN)
    assert list(met.members) == [1]
    ((node, reason),) = met.refused.items()
    assert node == f"node 10 {PRINTS[0]}"
    assert why in reason
    assert len(reason) <= 500


def test_names_are_cut_and_made_unique_and_who_is_gone_keeps_its_size():
    names = ("hospital", "hospital", "mean")
    grid = LocalGrid({10 + k: saying(k, HELLO._replace(name=name)) for k, name in enumerate(names)})
    met = meet(grid, Met(), ORDER, RUN)
    assert [*map(met.name, range(3))] == ["hospital", "hospital-1", "mean-2"]
    del grid.nodes[10]
    met = meet(grid, met, ORDER, RUN)
    assert list(met.members) == [1, 2]
    assert met.sizes == {0: 9, 1: 9, 2: 9}
    met = meet(LocalGrid({10: saying(0, HELLO._replace(name=HUGE))}), Met(), ORDER, RUN)
    assert len(met.name(0)) <= 80
    assert met.name(0).isprintable()


def test_a_number_belongs_to_the_first_key_and_the_bindings_survive_a_restart(tmp_path):
    grid = LocalGrid({10: saying(0), 11: saying(1)})
    met = write_clients(tmp_path, meet(grid, Met(), ORDER, RUN), 3)
    stored = json.loads((tmp_path / "clients.json").read_text())
    assert stored["0"] == {"name": "one", "key": PRINTS[0], "size": 9}
    assert stored["2"] == {"name": "client-2", "key": ""}
    again = read_clients(tmp_path, 3)
    assert (again.names, again.keys, again.sizes) == (met.names, met.keys, met.sizes)
    # Client 0 is away, and others claim its number, or a second one.
    found = meet(LocalGrid({12: saying(0), 11: saying(2)}), again, ORDER, RUN)
    assert not found.members
    assert f"client 0, which is bound to {PRINTS[0]}" in found.refused[f"node 12 {PRINTS[2]}"]
    assert f"{PRINTS[1]}, which is bound to clients [1]" in found.refused[f"node 11 {PRINTS[1]}"]
    # It comes back as another node, and keeps its name whatever it says.
    back = LocalGrid({13: saying(0, HELLO._replace(name="two"))})
    back.keys[13] = key_of(10)
    assert meet(back, again, ORDER, RUN).name(0) == "one"


def test_rounds_without_the_names_of_their_clients_are_refused(tmp_path):
    assert read_clients(tmp_path, 3) == Met()
    (tmp_path / "metrics.jsonl").write_text(
        '{"round": 1, "loss": {}, "weights": {}, "seconds": 1}\n'
    )
    with pytest.raises(WorkdirError, match=r"clients\.json"):
        read_clients(tmp_path, 3)


def test_a_list_of_keys_or_none_can_be_asked_for():
    listed = RUN._replace(client_keys=",".join(PRINTS))
    met = meet(LocalGrid({11: saying(0), 10: saying(1), 12: saying(2)}), Met(), ORDER, listed)
    assert list(met.members) == [2]
    grid = LocalGrid({11: saying(0)})
    met = met._replace(again={})
    assert meet(grid, met, ORDER, RUN._replace(client_keys="any")).members
    for wrong in ("some", ",".join(PRINTS[:2]), ",".join(PRINTS[:1] * 3), f"{PRINTS[0]},a,b"):
        with pytest.raises(ConfigError, match="client-keys="):
            run_of({"config": "quickstart", "clients": 3, "client-keys": wrong})
    grid.keys[11] = b"random bytes, as in Flower's simulation"
    assert meet(grid, Met(), ORDER, RUN).keys == {}
    assert not meet(grid, met, ORDER, listed).members


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path):
    try:
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", "node"]
        subprocess.run(command, cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip("ssh-keygen makes the key")
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_ssh_public_key,
    )

    public = (tmp_path / "node.pub").read_bytes()
    form = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    pem = load_ssh_public_key(public).public_bytes(*form)
    shown = subprocess.run(
        ["ssh-keygen", "-lf", "node.pub"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert prints_of([10], n10=pem) == [shown.stdout.split()[1]]


@pytest.mark.parametrize("score", [float("nan"), 100.5, -1.0, [1.0]])
def test_a_score_that_is_no_percentage_is_refused(score):
    content = packed(Answer("f", "fedavg", 0, 0), scores={"accuracy": 50})
    assert scores_in(content) == {"accuracy": 50}
    content["scores"]["accuracy"] = score
    with pytest.raises(ValueError, match="from 0 to 100"):
        scores_in(content)


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


MOST = (2**31 - 1) // 3  # the largest bound for three clients
BIAS = "shared/params/out/bias"
LIES = [
    ("round 1, not for fedavg and round 2", again),
    ("is not finite", changed(shared__params__out__bias=lambda x: x[BIAS] * np.nan)),
    ("is float64[8000000]", changed(shared__params__out__bias=lambda x: np.zeros(8_000_000))),
    ("is complex128", changed(shared__params__out__bias=lambda x: x[BIAS] * 1j)),
    ("norm of its update", changed(shared__params__out__bias=lambda x: x[BIAS] + 1e300)),
    ("it holds 20000", many),
    ("the records []", no_arrays),
]


@pytest.mark.slow
def test_no_lie_of_one_client_ends_or_slows_the_others_now_or_after_a_restart(folder, tmp_path):
    """Client 2 says that it has MOST samples, trains a round, and then lies in each round."""
    last, more = 1 + len(LIES), {"clients": 3, "minimum": 2, "time_limit": 5}
    changes = "method=fedavg,weigh=uniform"
    config = run_config(tmp_path / "server", f"{changes},rounds={last}", **more)
    config["size-bound"] = MOST
    grid = LocalGrid(nodes_of(folder, config))
    uploads = []

    def lies(message):
        """Answers as client 2 with what client 0 has just said."""
        order = record_in(message.content, Order)
        kind, number = message.metadata.message_type, order.round
        honest = next(
            up.content
            for down, up in reversed(grid.sent)
            if (up.metadata.src_node_id, down.metadata.message_type) == (10, kind)
        )
        if kind == "query":
            said = record_in(honest, Hello)._replace(size=MOST, name="liar")
            return Message(
                packed(Answer(order.federation, "fedavg", 2, 0), hello=said), reply_to=message
            )
        arrays = arrays_in(honest) | {"client": np.int32(2), "size": np.int32(MOST)}
        header = record_in(honest, Answer)._replace(client=2)
        content = packed(header, recorded(arrays))
        reply = Message(content, reply_to=message)
        uploads.append(Message(content, reply_to=message))
        if number > 1:
            LIES[number - 2][1](reply, uploads[0])
        return reply

    grid.nodes[12] = lies
    _, records = serve(grid, run_of(config), folder)
    assert records[0]["weights"] == pytest.approx(
        {"client-0": 1 / 3, "client-1": 1 / 3, "liar": 1 / 3}
    )
    for record, (why, _) in zip(records[1:], LIES, strict=True):
        assert list(record["left_out"]) == ["liar"]
        assert why in record["left_out"]["liar"]
    assert records[-1]["seconds"] < 5
    # Without the liar the same workdir continues; its number is not for another key.
    config["changes"] = f"{changes},rounds={last + 1}"
    grid = LocalGrid(nodes_of(folder, config))
    grid.nodes[13] = lies
    began = time.monotonic()
    _, records = serve(grid, run_of(config), folder)
    assert records[-1]["left_out"] == {"liar": "it is not connected"}
    (reason,) = records[-1]["refused"].values()
    assert f"bound to {PRINTS[2]}" in reason
    assert time.monotonic() - began < 30
    assert runs.command("report", str(tmp_path / "server"), f"--out={tmp_path / 'page.html'}") == 0
    page = (tmp_path / "page.html").read_text()
    for why in (reason, LIES[0][0], "it is not connected"):
        assert why in page


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
    with pytest.raises(ConfigError, match="no form of samples is that of most clients"):
        serve(grid, run_of(config), folder)
    assert not (tmp_path / "server" / "config.json").exists()
    del grid.nodes[11]
    with pytest.raises(TooFewError):
        serve(grid, run_of(config), folder)
