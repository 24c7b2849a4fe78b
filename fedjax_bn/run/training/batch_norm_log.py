"""How far the clients' batch norms are from each other, by layer, for a run's report.

`batch_norms/first.npz` is of the first round, `selected.npz` of the selected one. Before training
all clients have one model, and every distance is 0; it stays 0 where batch norms are shared.
"""

import io
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_bn.federation import FederatedState
from fedjax_bn.normalization.calls import in_forward_order
from fedjax_bn.run.evaluation.groups import some_of
from fedjax_bn.run.experiment.build import Experiment, sample_input
from fedjax_bn.run.files.workdir import not_readable, read_arrays, write_atomically
from fedjax_bn.run.processes.mesh import gathered
from fedjax_bn.run.processes.together import first
from fedjax_bn.run.training.population import Held
from fedjax_bn.sharing import STATISTICS, join, path_names

KINDS = ("mean", "std", "scale", "bias")
_FOLDER = "batch_norms"
_PARAMS = "params"
_EPSILON = 1e-5


class Distances(NamedTuple):
    """Distances of clients from their mean.

    Attributes:
      layers: names, such as "layer1_0/norm1", in the order of the forward pass.
      clients: names.
      values: kind of KINDS -> f[L, K]; NaN where a layer shares it or has none.
    """

    layers: list[str]
    clients: list[str]
    values: dict[str, np.ndarray]


def log_batch_norms(
    experiment: Experiment, folder: Path, state: FederatedState | Held, name: str, most: int = 100
) -> None:
    """Writes `batch_norms/NAME.npz` of a state, if clients keep anything of their batch norms.

    Args:
      experiment: the run's.
      folder: the workdir.
      state: its clients' rows; if they are on the disk nothing is written.
      name: of the file.
      most: clients that are written, evenly spaced if there are more.

    Raises:
      WorkdirError: it cannot be written.
    """
    if isinstance(state, Held):
        return
    # The leaves f[K, C] of batch norms that clients keep; shared leaves are not in the tree.
    leaves = {path_names(path): leaf for path, leaf in jax.tree.leaves_with_path(state.personal)}
    layers = {path[1:-1] for path in leaves if path[0] == STATISTICS}
    own = {
        path: leaf
        for path, leaf in leaves.items()
        if path[0] in (_PARAMS, STATISTICS) and path[1:-1] in layers and leaf.ndim == 2
    }
    own = gathered(own, experiment.mesh)
    if not own or not first():
        return
    names = [domain.name for domain in experiment.internal.domains]
    kept = some_of(len(names), most)
    found = distances({path: np.asarray(rows)[: len(names)] for path, rows in own.items()})
    # The order is that of a trace of one client's model.
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.personal)
    images = sample_input(experiment.internal, experiment.prepare, 2)
    layers = in_forward_order(found, experiment.model, join(state.shared, one), images)
    nothing = np.full(len(names), np.nan)
    file = io.BytesIO()
    np.savez_compressed(
        file,
        layers=np.array(layers),
        clients=np.array([names[k].encode("utf-8", "surrogatepass") for k in kept]),
        **{
            kind: np.float32([found[layer].get(kind, nothing)[kept] for layer in layers])
            for kind in KINDS
        },
    )
    write_atomically(folder / _FOLDER / f"{name}.npz", file.getvalue())


def distances(leaves: dict[tuple[str, ...], Any]) -> dict[str, dict[str, np.ndarray]]:
    """Returns layer -> kind -> distance f[K] of each client from the mean of all clients.

    All are root mean squares over the layer's channels.

    mean: of (mean_k - mean) / std, in standard deviations of the layer; std: of log std_k minus its
    mean over clients; scale and bias: of their difference from the mean.

    Args:
      leaves: (collection, ..., name) -> f[K, C], of batch norms.
    """

    def apart(rows: np.ndarray) -> np.ndarray:
        return np.sqrt(((rows - rows.mean(0)) ** 2).mean(1))

    found: dict[str, dict[str, np.ndarray]] = {}
    leaves = {path: np.asarray(leaf, np.float64) for path, leaf in leaves.items()}
    for layer in (path[1:-1] for path in leaves if path[0] == STATISTICS):
        mean, var = (leaves.get((STATISTICS, *layer, part)) for part in ("mean", "var"))
        kinds = found.setdefault("/".join(layer) or ".", {})
        if mean is not None and var is not None:
            kinds["mean"] = apart(mean / np.sqrt(var.mean(0) + _EPSILON))
            kinds["std"] = apart(np.log(var + _EPSILON) / 2)
        for kind in ("scale", "bias"):
            if (leaf := leaves.get((_PARAMS, *layer, kind))) is not None:
                kinds[kind] = apart(leaf)
    return found


def read_distances(folder: Path, name: str) -> Distances | None:
    """Returns the distances that a run wrote under a name; None if it wrote none.

    Args:
      folder: the run's workdir.
      name: first or selected.

    Raises:
      WorkdirError: the file is damaged.
    """
    path = folder / _FOLDER / f"{name}.npz"
    if not path.exists():
        return None
    stored = read_arrays(path)
    try:
        values = {kind: stored[kind] for kind in KINDS}
        clients = [one.decode("utf-8", "surrogatepass") for one in stored["clients"].tolist()]
        return Distances(stored["layers"].tolist(), clients, values)
    except (ValueError, KeyError, AttributeError) as error:
        raise not_readable(path, error) from error
