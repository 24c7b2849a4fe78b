"""What operators set, and what the two sides say of it before anything is trained."""

import csv
import json
import logging

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError, UserError
from fedjax_bn.federation import global_variables
from fedjax_bn.run.files import finished_run

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from fedjax_bn.flower.handshake import difference
from fedjax_bn.flower.members import Members
from fedjax_bn.flower.messages import Order, arrays_in, record_in
from fedjax_bn.flower.server import serve
from fedjax_bn.flower.settings import config_of, node_of, run_of
from fedjax_bn.flower.site import open_site
from fedjax_bn.flower.site_files import load_own
from fedjax_bn.sharing import join
from fedjax_bn.state import Own
from flower_apps import nodes_of, run_config
from flower_grid import LocalGrid

RUN = {"config": "quickstart", "clients": 3}
NODE = {"client": 0, "folder": "state"}
FORM = {"shape": [32, 32, 3], "dtype": "uint8", "mean": [0.5], "std": [0.5], "num_classes": 2}
FACTS = {
    "settings": {"method": "fedbn", "data.window": []},
    "form": FORM | {"classes": ["benign", "malignant"]},
    "network": {"params/norm/scale": "personal float32[4]", "params/out/bias": "shared float32[2]"},
}


@pytest.mark.parametrize(
    ("read", "change", "message"),
    [
        (run_of, {"config": ""}, "config=''"),
        (run_of, {"clients": 0}, "clients=0"),
        (run_of, {"minimum": 4}, "minimum=4"),
        (run_of, {"time-limit": 0}, "time-limit=0.0"),
        (run_of, {"size-bound": 2**30}, "size-bound=1073741824"),
        (run_of, {"size-bound": 0}, "size-bound=0"),
        (run_of, {"norm-bound": "big"}, "norm-bound='big'.*float"),
        (run_of, {"norm_bound": 1.0}, "'norm_bound'.*'norm-bound'"),
        (run_of, {"serve-unseen": 1}, "serve-unseen=1.*bool"),
        (node_of, {"client": -1}, "client=-1"),
        (node_of, {"folder": ""}, "folder=''"),
        (node_of, {"report": "names"}, "report='names'"),
        (node_of, {"domain": "a"}, "domain='a'"),
        (node_of, {"checkpoint-steps": 0}, "checkpoint-steps=0"),
        (node_of, {"fold": "x"}, "'fold'.*'folder'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_key(read, change, message):
    settings = RUN if read is run_of else NODE | {"partition-id": 0}
    read(settings)
    with pytest.raises(ConfigError, match=message):
        read(settings | change)


@pytest.mark.slow
def test_personal_leaves_leave_a_client_only_where_both_sides_say_so_and_are_then_served(
    folder, tmp_path, caplog
):
    """Then the server holds their mean with the round's weights, for unseen clients."""
    changes = "method=fedbn,rounds=1"
    config = run_config(tmp_path / "server", changes, serve_unseen=True, time_limit=0.1)
    with pytest.raises(UserError, match="0 of 2 clients are there"), caplog.at_level(30, "flwr"):
        serve(LocalGrid(nodes_of(folder, config)), run_of(config), folder)
    assert "set serve-unseen=true in its node config" in caplog.text

    config |= {"time-limit": 20}
    grid = LocalGrid(nodes_of(folder, config, serve_unseen=True))
    with caplog.at_level(20, "flwr"):
        kept, _ = serve(grid, run_of(config), folder)
    assert "personal leaves that leave this client: personal/batch_stats" in caplog.text
    assert "clients send their personal leaves too: personal/" in caplog.text
    order = record_in(grid.sent[-1][0].content, Order)
    places = [folder / f"client-{k}" / order.federation for k in range(2)]
    own = [load_own(place, 1, Own(kept.served, ())).personal for place in places]
    mean = jax.tree.map(lambda *x: np.average(x, 0, kept.state.weights), *own)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), kept.served, mean)
    about = finished_run.read_about(tmp_path / "server" / "served")
    own = finished_run.configuration(about["config"])
    _, served, _ = finished_run.restore(tmp_path / "server" / "served", own, about["form"])
    variables = join(kept.state.shared, mean)
    received = jax.jit(global_variables)(served)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), received, variables)

    sent = arrays_in(grid.sent[-1][1].content)
    assert [name for name in sent if name.startswith("personal/")]


def test_a_client_reads_its_own_data_in_place_of_the_configured(folder, tmp_path):
    """No target is looked for in them, and of several domains it says which is its own."""
    data = {
        f"{name}__{kind}": np.concatenate([getattr(split, kind)] * 3)
        for name, split in zip(("ant", "bee"), (runs.DATA.domains[0].train,) * 2, strict=True)
        for kind in ("images", "labels")
    }
    np.savez(tmp_path / "own.npz", **data)
    config = config_of("config.py", "data.name=npz,target=nowhere", folder)
    node = node_of(NODE | {"client": 1, "data": str(tmp_path / "own.npz"), "domain": "bee"})
    site = open_site(config, node, 2)
    (domain,) = site.experiment.internal.domains
    assert (domain.name, domain.train.images.shape[1:]) == ("bee", (6,))
    with pytest.raises(ConfigError, match=r"domain=''.*own\.npz.*ant, bee"):
        open_site(config, node._replace(domain=""), 2)
    config.data.name, config.data.path, config.target = "tiny", "none", "cow,dog"
    with pytest.raises(ConfigError, match=r"client=2.*tiny.*0, 1"):
        open_site(config, node_of(NODE | {"client": 2}), 2)


def test_a_client_that_hides_its_losses_refuses_a_rule_that_sends_them(folder, tmp_path):
    """FedDG-GA's message is two losses on the client's validation samples."""
    changes = "weigh=generalization_adjustment,data.validation=0.2"
    config = run_config(tmp_path / "server", changes)
    grid = LocalGrid(nodes_of(folder, config, report="sizes"))
    members = Members(grid, run_of(config), tmp_path)
    members.meet(Order("f", "fedavg", 0, 2, 0, False))
    assert not members.connected
    (_, reply), _ = grid.sent
    assert "sends this client's validation losses" in reply.error.reason


@pytest.mark.slow
def test_a_client_that_reports_nothing_sends_no_size_and_no_loss(folder, tmp_path):
    config = run_config(tmp_path / "server", "method=fedbn,rounds=1,weigh=uniform")
    grid = LocalGrid(nodes_of(folder, config, report="nothing"))
    _, (record,) = serve(grid, run_of(config), folder)
    assert record["loss"] == {"client-0": None, "client-1": None}
    assert record["weights"] == {"client-0": 0.5, "client-1": 0.5}
    for down, up in grid.sent:
        if down.metadata.message_type == "query":
            assert up.content["about"]["size"] == 0
        if down.metadata.message_type == "train":
            sent = arrays_in(up.content)
            assert sent["size"] == 1
            assert np.isnan(sent["loss"])
            assert np.isnan(sent["risk"])


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("form", {"shape": [48, 48, 3]}, ["image size", "48x48", "32x32", "data.image_size"]),
        ("form", {"shape": [3]}, ["image size none", "32x32"]),
        ("form", {"mean": [0.4]}, ["normalization", "[0.4]", "[0.5]"]),
        ("form", {"classes": ["malignant", "benign"]}, ["0=malignant", "0=benign", "order"]),
        ("form", {"classes": ["a", "b", "c"], "num_classes": 3}, ["3 (0=a", "2 (0=benign"]),
        ("network", {"params/out/bias": "shared float32[3]"}, ["out/bias", "[3]", "[2]"]),
        ("network", {"params/norm/scale": "shared float32[4]"}, ["norm/scale shared", "personal"]),
    ],
)
def test_a_difference_names_what_differs_both_values_and_a_remedy(part, change, words):
    other = json.dumps(FACTS | {part: FACTS[part] | change})
    said = difference(other, json.dumps(FACTS))
    assert all(word in said for word in words)
    assert said.count("it has the") == 1
    assert difference(other, other) == ""


@pytest.mark.slow
def test_a_run_without_rounds_only_scores_and_a_site_that_differs_is_refused(
    folder, tmp_path, caplog
):
    place = tmp_path / "server"
    config = run_config(place, "method=fedbn,rounds=1", minimum=1, time_limit=1)
    reports = {"report": "sizes,losses,accuracies"}
    both = nodes_of(folder, config, **reports)
    _, (trained,) = serve(LocalGrid({10: both[10]}), run_of(config), folder)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    config |= {"changes": "method=fedbn,rounds=0"}
    both[10] = nodes_of(folder, config, predictions=True, **reports)[10]
    grid = LocalGrid(both)
    _, (record,) = serve(grid, run_of(config), folder)
    assert record["accuracy"]["client-0"] == trained["accuracy"]["client-0"]
    assert (record["round"], record["untrained"]) == (1, ["client-1"])
    written = place / "evaluations" / "sites.json"
    assert json.loads(written.read_text()) == record
    after = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert after == before | {written: after[written]}
    answers = [reply for _, reply in grid.sent if reply.metadata.message_type != "query"]
    assert [{*answer.content} for answer in answers] == [{"header", "scores"}] * 2
    federation = record_in(grid.sent[-1][0].content, Order).federation
    places = [folder / f"client-{k}" / federation / "predictions.csv" for k in range(2)]
    rows = np.array([*csv.reader(places[0].read_text().splitlines())][1:])
    label, answer, chances = rows[:, 4].astype(int), rows[:, 5].astype(int), rows[:, 6:]
    assert 100 * np.mean(label == answer) == pytest.approx(record["accuracy"]["client-0"])
    np.testing.assert_array_equal(chances.astype(float).argmax(1), answer)
    assert not places[1].exists()

    other = {"d__images": np.zeros((40, 12), np.float32), "d__labels": np.arange(40) % 4}
    np.savez(tmp_path / "own.npz", **other)
    foreign = config | {"changes": "method=fedbn,data.name=npz"}
    both[11] = nodes_of(folder, foreign, data=str(tmp_path / "own.npz"), name="hospital-b")[11]
    with caplog.at_level(logging.WARNING, "flwr"):
        _, (record,) = serve(LocalGrid(both), run_of(config), folder)
    (reason,) = record["refused"].values()
    sentence = reason.removeprefix("it failed: ")
    assert all(part in sentence for part in ("client 1 (hospital-b)", "12, the server 6"))
    logged = [line.getMessage() for line in caplog.records if sentence in line.getMessage()]
    assert logged == [sentence, f"node 11 is left out: {reason}"]  # the site's and the server's
    assert record["accuracy"]["client-1"] is None  # NaN is not JSON
    assert json.loads(written.read_text(), parse_constant=pytest.fail) == record
