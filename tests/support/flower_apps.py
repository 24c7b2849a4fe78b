"""Small federations over Flower in this process, and the simulations that they must equal."""

import jax
import numpy as np

from federations import assert_close
from fedjax_bn.arguments.text import file_name
from fedjax_bn.federation import traffic
from fedjax_bn.flower import client_app
from fedjax_bn.flower.settings import config_of
from fedjax_bn.flower.site_files import load_own
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.state import Own
from fedjax_bn.training.rounds import open_rounds
from fedjax_bn.training.start import batches_of_one
from flower_grid import node

CONFIG = """
from fedjax_bn.run.config import base, override

def get_config(changes=""):
    config = base()
    config.model = "double_net:DoubleNet"
    config.rounds = 2
    config.batch_size = 8
    config.optimizer.momentum = 0.5
    config.seed = 2
    config.mesh.clients = 1
    config.data.name, config.data.path, config.target = "tiny", "none", "cow,dog"
    return override(config, changes)
"""
QUIET = "sizes,losses"  # what clients report where nobody shall be evaluated, which compiles


def simulated(folder, changes):
    """The state behind the rounds of one program of the same configuration, and its traffic."""
    config = config_of("config.py", changes, folder)
    experiment, keys, start = prepare(config, traced=False)
    state = start()
    rounds = open_rounds(experiment, keys, state)
    batches = batches_of_one(experiment) | {"population": jax.ShapeDtypeStruct((), np.int32)}
    sent = traffic(experiment.method, jax.eval_shape(start), batches)
    round = rounds.compile(state)
    for _ in range(config.rounds):
        state, _ = round(state)
    return jax.device_get(state), sent


def run_config(workdir, changes, **more):
    """The run config of two clients."""
    config = {"config": "config.py", "changes": changes, "clients": 2, "workdir": str(workdir)}
    config |= {"time-limit": 20, "attempts": 1}
    return config | {key.replace("_", "-"): value for key, value in more.items()}


def nodes_of(folder, config, report=QUIET, **more):
    """Nodes 10 and 11, which are clients 0 and 1; what they keep lies in folders of the app's."""
    app = client_app(folder)
    places = {k: str(folder / f"client-{k}") for k in range(2)}
    return {
        10 + k: node(app, config, client=k, folder=places[k], report=report, **more) for k in places
    }


def assert_same(folder, kept, federation, state):
    """The server, and the clients' folders, hold what the simulation's state holds."""
    like = jax.tree.map(lambda x: x[0], Own(state.personal, state.memory))
    places = [folder / f"client-{k}" / file_name(federation) for k in range(2)]
    own = [load_own(place, int(kept.taken[k]), like) for k, place in enumerate(places)]
    own = jax.tree.map(lambda *leaves: np.stack(leaves), *own)
    for ours, theirs in (
        (kept.state.shared, state.shared),
        (kept.state.server, state.server),
        (kept.state.weights, state.weights),
        (own.personal, state.personal),
        (own.memory, state.memory),
    ):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
