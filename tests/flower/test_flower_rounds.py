"""Rounds of a federation of three numbers: sums as uploads come, and clients that change."""

import json
import logging
import math
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from flwr.app import Message

from fedjax_bn import aggregation
from fedjax_bn.aggregation import Weighing, averaging, by_size, krum, risk_extrapolation, uniform
from fedjax_bn.arguments.errors import ConfigError, RiskError, UserError
from fedjax_bn.engine.named_arrays import to_named
from fedjax_bn.flower.host import Host, Kept, add_and_step
from fedjax_bn.flower.members import Members
from fedjax_bn.flower.messages import Answer, Hello, Order, exchange, packed, record_in, recorded
from fedjax_bn.flower.server import evaluate, play
from fedjax_bn.flower.settings import Run, config_of
from fedjax_bn.incremental_aggregation import adding
from fedjax_bn.state import FederatedState, ServerState, Upload
from fedjax_bn.training.experiment import Participation
from fedjax_bn.training.records import out_of_patience, select_round
from flower_grid import LocalGrid

ORDER = Order("f", "fedavg", 0, 3, 5, False)
RUN = Run(clients=3, minimum=1, time_limit=1.0, attempts=1)
FORM = '{"num_classes": 3, "shape": [6], "dtype": "uint8", "mean": [0.5], "std": [0.5]}'
SERVER = averaging(lambda shared, personal: (), lambda sent, one: sent + one.message)


def upload_of(k, size=None, risk=1.0):
    random = np.random.default_rng(k)
    return Upload(
        shared={"params": {"w": random.normal(size=(2, 3))}},
        message=random.normal(size=2),
        size=np.int32(size or k + 3),
        risk=np.float32(risk),
        loss=np.float32(risk),
        finite=np.array(True),
        participates=np.array(True),
        client=np.int32(k),
        population=np.int32(3),
    )


def accepted(k, **given):
    personal = {"scale": np.full(2, k + 1, np.float16), "count": np.array(7 * k + 1)}
    return upload_of(k, **given), personal


FORMS = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), accepted(0))


def begun(personal=()):
    state = FederatedState(
        round=jnp.asarray(4, jnp.int32),
        shared={"params": {"w": jnp.ones((2, 3))}},
        server=ServerState(sent=jnp.ones(2)),
        weights=jnp.asarray([0.5, 0.25, 0.25]),
        weighing=(),
        personal=(),
        memory=(),
    )
    return Kept(state, personal, jnp.asarray([2, 3, 1], jnp.int32))


def stacked(weigh, personal=FORMS[1], server=SERVER):
    if isinstance(weigh, Weighing):  # robust rules allow no message

        def serve(state, uploads):
            return aggregation.server_step(averaging(), weigh, state, uploads._replace(message=()))
    else:
        serve = partial(aggregation.server_step, server, weigh)
    method = SimpleNamespace(adding=None, checked_server=serve)
    return add_and_step(method, 3, FORMS[0], personal)


def summed(weigh, personal=FORMS[1], server=SERVER):
    method = SimpleNamespace(adding=adding(server, weigh))
    return add_and_step(method, 3, FORMS[0], personal)


def stepped(ways, kept, some):
    (add, step), total = ways, None
    for one in some:
        total = add(total, *one)
    return jax.device_get(step(kept, total, np.arange(3, dtype=np.int32)))


@pytest.mark.parametrize("there", [(0, 1, 2), (0, 2), ()])
@pytest.mark.parametrize("weigh", [by_size, uniform])
def test_sums_of_uploads_that_come_one_by_one_are_the_stacked_ones(x64, weigh, there):
    kept = begun(jax.tree.map(jnp.asarray, accepted(5)[1]))
    some = [accepted(k) for k in there]
    ours, weights, _ = stepped(summed(weigh), kept, some)
    theirs, known, _ = stepped(stacked(weigh), kept, some)
    np.testing.assert_allclose(weights, known, rtol=1e-14)
    assert weights.any() == bool(there)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, rtol=1e-12)
    if not there:  # all stays but the round
        np.testing.assert_array_equal(ours.state.weights, kept.state.weights)
        np.testing.assert_array_equal(ours.served["scale"], kept.served["scale"])


class Sites(LocalGrid):
    """Nodes 10 to 12, which are clients that send the same upload in each round.

    Of the uploads that are fetched it counts how many are in use at most.
    """

    def __init__(self, *late):
        super().__init__({10 + k: partial(self.answer, k) for k in range(3)})
        self.size, self.number, self.late = {0: 3, 1: 4, 2: 5}, {0: 0, 1: 1, 2: 2}, late
        self.risk, self.lives = [1.0] * 3, []
        self.scores = [{"accuracy": 50.0, "validation": 60.0 + k} for k in range(3)]
        self.asked, self.arrived, self.most = [], [], 0

    def answer(self, place, message):
        k, order = self.number[place], record_in(message.content, Order)
        self.asked.append((message.metadata.message_type, order.round, place))
        header = Answer("f", "fedavg", k, order.round)
        if message.metadata.message_type == "query":
            hello = Hello("", self.size[place], True, True, FORM)
            content = packed(header, hello=hello)
        elif message.metadata.message_type == "evaluate":
            content = packed(header, scores=self.scores[place])
        else:
            upload = upload_of(k, self.size[place], self.risk[place])
            content = packed(header, recorded(to_named(upload)))
        return Message(content, reply_to=message)

    def push_messages(self, messages):
        self.lives += [one.metadata.ttl for one in messages]
        return super().push_messages(messages)

    def pull_messages(self, names):
        found = super().pull_messages([name for name in names if not self.is_late(name)])
        self.sent.clear()
        for one in found:
            if not one.has_error() and "arrays" in one.content:
                self.arrived.append(one.content["arrays"]["shared/params/w"].data)
        # Without `gc.collect`: messages must not wait for it in a cycle.
        used = [sys.getrefcount(self.arrived[k]) > 2 for k in range(len(self.arrived))]
        self.most = max(self.most, sum(used))
        return found

    def is_late(self, name):
        return int(name.split("-")[1]) in self.late


@pytest.fixture(params=[by_size])
def host(request, x64):
    way = summed if adding(SERVER, request.param) else stacked
    add, step = way(request.param, ())
    config = SimpleNamespace(weigh="", method="fedavg", clients_named=100)
    return SimpleNamespace(
        order=ORDER, form=FORM, config=config, upload=FORMS[0], personal=(), add=add,
        step=step, participation=Participation(0, "uniform", 0.0, None, False),
        keys=SimpleNamespace(participation=jax.random.key(0)),
    )  # fmt: skip


@pytest.fixture
def members(tmp_path):
    return Members(Sites(), RUN, tmp_path)


def played(host, members, kept=None):
    with jax.numpy_dtype_promotion("standard"):
        return play(host, members, kept or begun())


RULES = [(by_size, 1), (risk_extrapolation(), 3)]


@pytest.mark.parametrize(("host", "most"), RULES, indirect=["host"])
def test_a_round_by_sums_holds_one_upload_at_a_time_and_compiles_once(host, members, most, caplog):
    grid = members.grid
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        _, record = played(host, members)
    assert (len(grid.arrived), grid.most) == (3, most)
    assert caplog.text.count("Compiling jit(put)") == (most == 1)
    if most == 1:
        expected = {"client-0": 3 / 12, "client-1": 4 / 12, "client-2": 5 / 12}
        assert record["weights"] == pytest.approx(expected)


def test_who_is_late_makes_no_other_late_and_the_order_of_arrival_does_not_matter(host, members):
    """Node 10 never answers, so that the others' answers are fetched after the time limit."""
    members.meet(ORDER)
    members.grid = grid = Sites(10)
    kept, record = played(host, members)
    assert record["left_out"] == {"client-0": "it did not answer in time"}
    assert [*record["weights"].values()] == pytest.approx([0, 4 / 9, 5 / 9])
    np.testing.assert_array_equal(kept.taken, [2, 5, 5])
    # Flower deletes a reply when its message expires, which must be later than the time limit.
    assert min(grid.lives) >= 2 * RUN.time_limit


def test_a_lost_connection_is_no_fault_of_a_client():
    grid = Sites()

    def lost(*given):
        raise ConnectionError("the SuperLink is gone")

    grid.pull_messages = grid.get_nodes = lost
    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        exchange(grid, {10: packed(ORDER)}, "query", 1.0, lambda node, reply: reply)


def asked_of(grid, place):
    """The kinds of questions to a node since the last call."""
    found = [kind for kind, _, node in grid.asked if node == place]
    grid.asked.clear()
    return found


def test_a_client_that_was_started_again_with_other_data_takes_part_again(host, members):
    grid = members.grid
    kept, _ = played(host, members)
    grid.size[1] = 9
    asked_of(grid, 1)
    kept, record = played(host, members, kept)
    assert "it speaks for client 1 with 9 samples" in record["left_out"]["client-1"]
    assert asked_of(grid, 1) == ["train"]
    kept, record = played(host, members, kept)
    assert "left_out" not in record
    assert record["weights"]["client-1"] == pytest.approx(9 / 17)
    assert asked_of(grid, 1) == ["query", "train"]
    played(host, members, kept)
    assert asked_of(grid, 1) == ["train"]


def test_a_client_that_is_another_one_now_is_held_to_its_key_and_asked_after_a_pause(host, members):
    kept, _ = played(host, members)
    members.grid.number[2] = 0
    kept, record = played(host, members, kept)
    assert list(record["left_out"]) == ["client-2"]
    kept, record = played(host, members, kept)
    assert record["left_out"] == {"client-2": "it is not connected"}
    (reason,) = record["refused"].values()
    assert "it presents itself as client 0, which is bound to SHA256:" in reason
    asked_of(members.grid, 2)
    played(host, members, kept)
    assert asked_of(members.grid, 2) == []


def test_a_client_that_changes_in_each_round_is_asked_anew_once_and_then_after_a_pause(
    host, members
):
    members.run = RUN._replace(attempts=3, minimum=3)
    grid = members.grid
    kept, _ = played(host, members)
    asked_of(grid, 1)

    def changes(message):
        grid.size[1] += 1
        return grid.answer(1, message)

    grid.nodes[11] = changes
    with pytest.raises(UserError, match="minimum=3"):
        played(host, members, kept)
    assert asked_of(grid, 1) == ["train", "query", "train", "train"]


def test_bindings_are_stored_before_a_client_trains(host, members, tmp_path):
    def dies(message):
        if message.metadata.message_type == "train":
            raise KeyboardInterrupt
        return members.grid.answer(2, message)

    members.grid.nodes[12] = dies
    with pytest.raises(KeyboardInterrupt):
        played(host, members)
    stored = json.loads((tmp_path / "clients.json").read_text())
    assert len({entry["key"] for entry in stored.values()}) == 3


@pytest.mark.parametrize("host", [krum(malicious=0)], indirect=True)
def test_a_round_of_krum_with_too_few_clients_is_shown_as_in_a_simulation(host, members, caplog):
    """It needs three clients, and one of them is away."""
    kept, record = played(host, members)
    assert sorted(record["weights"].values()) == [0, 0, 1]
    del members.grid.nodes[11]
    with caplog.at_level(logging.WARNING, "flwr"):
        after, record = played(host, members, kept)
    assert record["weights"] == {"client-0": 0, "client-1": 0, "client-2": 0}
    assert "round 6: no client counts: the shared leaves stay" in caplog.text
    np.testing.assert_array_equal(after.state.weights, kept.state.weights)


@pytest.mark.parametrize("host", [risk_extrapolation()], indirect=True)
def test_a_negative_risk_leaves_its_client_out_and_ends_a_round_that_needs_it(host, members):
    members.grid.risk[1] = -1.0
    kept, record = played(host, members)
    np.testing.assert_array_equal(kept.taken, [5, 3, 5])
    assert record["left_out"] == {"client-1": "the weighing rule of fedavg cannot weigh its risk"}
    assert record["weights"]["client-0"] > 0 == record["weights"]["client-1"]
    members.run = RUN._replace(minimum=3)
    with pytest.raises(RiskError, match=r"risks of client-1"):
        played(host, members, kept)


def test_krum_with_too_few_clients_is_refused_before_the_first_round():
    changes = "method=fedavg,model=MLP,mesh.clients=1,weigh=krum:malicious=1,clients_per_round=4"
    config = config_of("quickstart", changes, ".")
    with pytest.raises(ConfigError, match=r"krum.*\b4\b"):
        Host(config, ORDER._replace(population=6), FORM)


@pytest.mark.parametrize("way", [summed, stacked])
def test_a_servers_step_that_is_not_finite_is_recorded(host, members, way, caplog):
    """A client can cause it with numbers that are finite, such as a divisor of 1e-300."""
    far = averaging(lambda shared, personal: (), lambda sent, one: sent + one.message / 1e-320)
    host.add, host.step = way(by_size, (), far)
    with caplog.at_level(logging.WARNING, "flwr"):
        after, record = played(host, members, kept := begun())
    assert record["server_finite"] is False
    assert "round 5: the server's step is not finite: the shared leaves stay" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, after.state.shared, kept.state.shared)


def test_scores_that_some_rounds_or_clients_lack_end_no_run(host, members):
    """Clients 0 and 1 come to be evaluated after client 2, which has no validation samples."""
    kept, _ = played(host, members)
    connected, scores = members.connected, members.grid.scores
    members.connected = {2: connected[2]}
    scores[2] = {"accuracy": 40.0}
    first = {"round": 1} | evaluate(host, members, kept)
    for wrong in ({"validation": 99.0}, *({"accuracy": x} for x in (math.nan, 100.5, -1.0))):
        scores[2] = wrong
        assert evaluate(host, members, kept) == {}
    members.connected = connected
    second = {"round": 2} | evaluate(host, members, kept)
    assert second["validation"]["mean"] == 60.5
    assert select_round([first, second]) == select_round([first, second, first]) == 2
    assert not out_of_patience([first, second], 2)


def test_the_record_says_which_samples_the_clients_are_scored_on(host, members):
    kept, _ = played(host, members)
    parts = [evaluate(host, members, kept)["tested_on"]]
    for scores in members.grid.scores:
        scores["tested_on_validation"] = 100.0
        parts.append(evaluate(host, members, kept)["tested_on"])
    mixed = "validation and test"
    assert [part["internal"] for part in parts] == ["test", mixed, mixed, "validation"]
