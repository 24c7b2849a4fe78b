"""A client that joins a finished federation learns batch norm alone (FedBN, Appendix G)."""

import json

import jax
import joining
import numpy as np
import pytest

import runs
from fedjax_bn import sharing
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.run.files import finished_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of FedBN that left dog out."""
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        folder = tmp_path_factory.mktemp("joining") / "run"
        config = runs.config(method="fedbn", rounds=2, optimizer__learning_rate=0.3)
        runs.train.run(config, folder, say=lambda text: None)
        yield folder


@pytest.mark.slow
def test_only_batch_norm_moves(run):
    about = finished_run.read_about(run)
    config = finished_run.configuration(about["config"])
    experiment, state, _ = finished_run.restore(run, config, about["form"])
    received = global_variables(state)
    joined, accuracy = joining.join(
        config, experiment, received, joining.find_client(config, "dog")
    )
    own = jax.tree.map(lambda leaf: leaf[0], client_variables(joined))
    stays = jax.tree.leaves(sharing.all_but_batch_norm(received))
    for before, after, same in zip(*map(jax.tree.leaves, (received, own)), stays, strict=True):
        assert np.array_equal(before, after) == same
    assert accuracy.keys() == {"received", "joined"}


@pytest.mark.slow
def test_the_command_writes_an_evaluation_that_reports_read(run, capsys):
    assert joining.main(["--workdir", str(run), "--epochs", "30"]) == 0
    written = json.loads((run / "evaluations" / "joined.json").read_text())
    accuracy = written["unseen"]["dog"]
    assert accuracy["joined"] > accuracy["received"]
    assert f"joined {accuracy['joined']:.2f} %" in capsys.readouterr().out
