"""How far the clients' batch norms lie apart, by layer, for a run's report.

`batch_norms/first.npz` is of the first round, `selected.npz` of the selected one. Before training
all clients have one model, and every distance is 0; so it stays where batch norms are shared.
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
from fedjax_bn.sharing import STATISTICS, Variables, join, path_names

FOLDER = "batch_norms"
KINDS = ("mean", "std", "scale", "bias")
_PARAMS = "params"
_EPSILON = 1e-5
Leaves = dict[tuple[str, ...], Any]  # (collection, ..., name) -> f[K, C]


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
    """Writes `batch_norms/NAME.npz` of a state, where clients keep anything of their batch norms.

    Args:
      experiment: the run's.
      folder: the workdir.
      state: its clients' rows; of rows on the disk nothing is written.
      name: of the file.
      most: of more clients some are told of, evenly spaced.

    Raises:
      WorkdirError: it cannot be written.
    """
    if isinstance(state, Held):
        return
    own = gathered(own_batch_norms(state.personal), experiment.mesh)
    if not own or not first():
        return
    names = [domain.name for domain in experiment.internal.domains]
    shown = some_of(len(names), most)
    found = distances({path: np.asarray(rows)[: len(names)] for path, rows in own.items()})
    layers = in_forward_order(found, experiment.model, *_one_pass(experiment, state))
    arrays = {
        kind: np.array([found[layer].get(kind, np.full(len(names), np.nan)) for layer in layers])
        for kind in KINDS
    }
    file = io.BytesIO()
    np.savez_compressed(
        file,
        layers=np.array(layers),
        clients=np.array([names[k].encode("utf-8", "surrogatepass") for k in shown]),
        **{kind: np.float32(values[:, shown]) for kind, values in arrays.items()},
    )
    write_atomically(folder / FOLDER / f"{name}.npz", file.getvalue())


def _one_pass(experiment: Experiment, state: FederatedState) -> tuple[Variables, jax.Array]:
    """The shapes of a client's variables, and images: what a trace of the model takes."""
    own = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state.personal
    )
    return join(state.shared, own), sample_input(experiment.internal, experiment.prepare, 2)


def own_batch_norms(personal: object) -> Leaves:
    """The leaves of batch norms that clients keep, f[K, C], of a tree with None for shared ones."""
    leaves = {
        path_names(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(personal)
        if path_names(path[:1])[0] in (_PARAMS, STATISTICS)
    }
    layers = {path[1:-1] for path in leaves if path[0] == STATISTICS}
    return {path: leaf for path, leaf in leaves.items() if path[1:-1] in layers and leaf.ndim == 2}


def distances(leaves: Leaves) -> dict[str, dict[str, np.ndarray]]:
    """Layer -> kind -> distance f[K] of each client from the mean of all clients.

    All are root mean squares over the layer's channels.

    mean: of (mean_k - mean) / std, in standard deviations of the layer; std: of log std_k minus its
    mean over clients; scale and bias: of their difference from the mean.

    Args:
      leaves: as `own_batch_norms` gives them.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    leaves = {path: np.asarray(leaf, np.float64) for path, leaf in leaves.items()}
    for path in leaves:
        if path[0] != STATISTICS:
            continue
        layer, name = path[1:-1], "/".join(path[1:-1]) or "."
        mean, var = (leaves.get((STATISTICS, *layer, part)) for part in ("mean", "var"))
        kinds = found.setdefault(name, {})
        if mean is not None and var is not None:
            kinds["mean"] = _apart(mean / np.sqrt(var.mean(0) + _EPSILON))
            kinds["std"] = _apart(np.log(var + _EPSILON) / 2)
        for kind in ("scale", "bias"):
            if (leaf := leaves.get((_PARAMS, *layer, kind))) is not None:
                kinds[kind] = _apart(leaf)
    return found


def _apart(rows: np.ndarray) -> np.ndarray:
    """f[K]: root mean square over channels of what each row f[K, C] has more than their mean."""
    return np.sqrt(((rows - rows.mean(0)) ** 2).mean(1))


def read_distances(folder: Path, name: str) -> Distances | None:
    """The distances that a run wrote under a name; None where it wrote none.

    Args:
      folder: the run's workdir.
      name: first or selected.

    Raises:
      WorkdirError: the file is damaged.
    """
    path = folder / FOLDER / f"{name}.npz"
    if not path.exists():
        return None
    stored = read_arrays(path)
    try:
        values = {kind: stored[kind] for kind in KINDS}
        clients = [one.decode("utf-8", "surrogatepass") for one in stored["clients"].tolist()]
        return Distances(stored["layers"].tolist(), clients, values)
    except (ValueError, KeyError, AttributeError) as error:
        raise not_readable(path, error) from error
