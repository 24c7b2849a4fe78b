"""A site that dies within a round goes on from its last stored step, to the same bits."""

import jax
import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.federation import broadcast_of, own_of
from fedjax_bn.flower import site, site_files
from fedjax_bn.flower.messages import Order
from fedjax_bn.flower.server import serve
from fedjax_bn.flower.settings import config_of, node_of, run_of
from flower_apps import nodes_of, run_config
from flower_grid import LocalGrid

FEDBN = "method=fedbn,batch_size=4,local_epochs=3"
CHANGES = (
    "method=scaffold,share=all_but_batch_norm,batch_size=4,local_epochs=3",
    *(f"method={name}" for name in ("moon", "fedrep", "fedala", "fedadg")),
    "method=fedbn,privacy=client:clip=0.1",
    "method=fedbn,optimizer.keep=True,data.device_megabytes=0",  # read by the host
)


@pytest.fixture
def disk(monkeypatch):
    """Counts the pieces that sites store; they die before the one of the number `dies_at`."""
    write = site_files.write_atomically

    def store(path, content):
        store.count += path.name == "begun.npz"
        if path.name == "begun.npz" and store.count == store.dies_at:
            raise KeyboardInterrupt
        write(path, content)

    store.count = store.dies_at = 0
    monkeypatch.setattr(site_files, "write_atomically", store)
    return store


def opened(folder, changes, **settings):
    """A site's training of a broadcast, or of its first one, from which it goes on in a file."""
    node = node_of({"client": 1, "folder": "x"} | settings)
    client = site.open_site(config_of("config.py", changes, folder), node, 2)
    start = client.start()

    def train(path, sent=None):
        own, order = jax.device_get(own_of(start, 0)), Order("f", "m", 0, 2, 0, False)
        trained = client.train(order, sent or broadcast_of(start), own, path)
        return jax.tree.leaves(jax.device_get(trained))

    return train, broadcast_of(start)


@pytest.mark.parametrize(
    "changes", [FEDBN, *(pytest.param(x, marks=pytest.mark.slow) for x in CHANGES)]
)
def test_a_site_goes_on_from_its_last_piece_and_from_no_other_training(
    folder, tmp_path, disk, changes
):
    """Neither the setting nor a death changes a bit of what is sent and of what stays."""
    (whole, sent), path = opened(folder, changes), tmp_path / "begun.npz"
    pieces, _ = opened(folder, changes, **{"checkpoint-steps": 2})

    def pieces_of(sent, train=pieces):
        disk.count = disk.dies_at = 0
        np.testing.assert_equal(train(path, sent), whole(path, sent))
        return disk.count

    count = pieces_of(sent)
    path.write_bytes(path.read_bytes()[:-100])  # as of a disk that has lost some
    assert pieces_of(sent) == count
    moved = sent._replace(shared=jax.tree.map(lambda leaf: leaf * 2, sent.shared))
    for asked, stored in ((sent, 1), (moved, 0), (sent._replace(round=sent.round + 1), 0)):
        path.unlink()
        disk.count, disk.dies_at = 0, 2
        with pytest.raises(KeyboardInterrupt):
            pieces(path, sent)
        assert pieces_of(asked) == count - stored


@pytest.mark.slow
def test_a_run_whose_processes_die_in_a_round_ends_as_if_they_had_not(
    folder, tmp_path, disk, caplog
):
    """Client 0 goes on in round 2, and finished rounds leave nothing behind."""
    states = []
    for name, node in (("whole", {}), ("pieces", {"checkpoint_steps": 2})):
        config = run_config(tmp_path / name, "method=fedbn")
        run, nodes = run_of(config), nodes_of(folder, config, **node)
        if node:
            disk.dies_at = 6  # a client stores two pieces a round
            with pytest.raises(KeyboardInterrupt):
                serve(LocalGrid(nodes), run, folder)
            (path,) = folder.glob("client-0/*/begun.npz")
        with caplog.at_level("INFO", "flwr"):
            kept, _ = serve(LocalGrid(nodes), run, folder)
        states.append(jax.device_get(kept.state))
    assert "going on from step 2 of 3" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert not path.exists()


@pytest.mark.slow
def test_a_training_of_other_settings_is_not_used(folder, tmp_path, disk):
    for changes, every in (("", 2), (",optimizer.learning_rate=0.02", 2), ("", 1)):
        train, _ = opened(folder, f"method=fedbn{changes}", **{"checkpoint-steps": every})
        disk.count = 0
        train(tmp_path / "begun.npz")
        assert disk.count == -(-3 // every)


def test_a_chosen_state_of_a_round_cannot_be_stored(folder):
    with pytest.raises(ConfigError, match=r"checkpoint-steps=2.*local_selection=1"):
        opened(folder, "method=fedbn,local_selection=1", **{"checkpoint-steps": 2})
