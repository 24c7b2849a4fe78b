"""Writes what a run's report needs of its clients: distances of batch norms, and masks.

`batch_norms/first.npz` has the distances of the clients' batch norms from their mean, by layer,
after the first round, and `selected.npz` has those of the selected round. Before training all
clients have the same model, so every distance is 0. Shared leaves have none. `masks/ROUND.npz` has
the clients' masks, if they have any.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_bn.adaptation import running
from fedjax_bn.data.domain import Domain, select
from fedjax_bn.federation import FederatedState, client_variables
from fedjax_bn.models.masks import COLLECTION, FEATURES, take
from fedjax_bn.normalization.calls import in_forward_order
from fedjax_bn.sharing import FROZEN, STATISTICS, filled, join, path_names, without
from fedjax_bn.training.evaluation.groups import by_client, some_of
from fedjax_bn.training.evaluation.per_sample import features_of
from fedjax_bn.training.evaluation.plots import masked_features
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.mesh import gathered
from fedjax_bn.training.population import AnyState, PopulationState
from fedjax_bn.training.records import Record, select_round
from fedjax_bn.training.start import sample_input
from fedjax_bn.training.together import first
from fedjax_bn.training.workdir import (
    not_readable,
    read_arrays,
    write_atomically,
    write_picture,
)

_KINDS = ("mean", "std", "scale", "bias")
_FOLDER, _PARAMS = "batch_norms", "params"
_EPSILON = 1e-5  # added to every variance, as in batch norm
_SAMPLES = 256  # test images of a client whose features are plotted


class ClientLogs(NamedTuple):
    """Writes distances of batch norms and masks; adds `mask_l1` to the record.

    Attributes:
      experiment: the run's.
      folder: the workdir.
      records: the run's, to which the loop appends.
    """

    experiment: Experiment
    folder: Path
    records: list[Record]

    def on_round_end(self, round: int, state: AnyState, metrics: Record) -> None:
        """Writes what the report needs of this round."""
        metrics.update(_log_masks(self.experiment, self.folder, state))
        is_selected = "accuracy" in metrics and select_round(self.records) == round
        for moment, due in (("first", round == 1), ("selected", is_selected)):
            if due:
                log_batch_norms(self.experiment, self.folder, state, moment)

    def on_train_end(self, round: int, state: AnyState, metrics: Record) -> None:
        """Draws masked features."""
        del round, metrics
        _draw_masks_of(self.experiment, self.folder, state)


class Distances(NamedTuple):
    """Distances of clients from their mean.

    Attributes:
      layers: names, such as "layer1_0/norm1", in the order of the forward pass.
      clients: names.
      values: kind of _KINDS -> f[L, K]; NaN where a layer shares that leaf or lacks it.
    """

    layers: list[str]
    clients: list[str]
    values: dict[str, np.ndarray]


def log_batch_norms(experiment: Experiment, folder: Path, state: AnyState, name: str) -> None:
    """Writes `batch_norms/NAME.npz` for a state, if clients keep anything of their batch norms.

    At most `clients_named` clients are written, evenly spaced.

    Args:
      experiment: the run's.
      folder: the workdir.
      state: the run's; nothing is written if its clients' rows are on the host.
      name: of the file.

    Raises:
      WorkdirError: the file cannot be written.
    """
    if isinstance(state, PopulationState):
        return
    # The leaves f[K, C] of batch norms that clients keep; shared leaves are not in the tree.
    leaves = {path_names(path): leaf for path, leaf in jax.tree.leaves_with_path(state.personal)}
    layers = {path[1:-1] for path in leaves if path[0] == STATISTICS}
    norm_leaves = {
        path: leaf
        for path, leaf in leaves.items()
        if path[0] in (_PARAMS, STATISTICS) and path[1:-1] in layers and leaf.ndim == 2
    }
    norm_leaves = gathered(norm_leaves, experiment.mesh)
    if not norm_leaves or not first():
        return
    names = [domain.name for domain in experiment.internal.domains]
    named_clients = some_of(len(names), experiment.plan.clients_named)
    distances = _distances(
        {path: np.asarray(rows)[: len(names)] for path, rows in norm_leaves.items()}
    )
    # Layers are ordered by a trace of one client's model.
    client_form = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.personal)
    images = sample_input(experiment.internal, experiment.prepare, 2)
    variables = filled(without(join(state.shared, client_form), FROZEN), state.frozen)
    layers = in_forward_order(distances, experiment.model, variables, images)
    nothing = np.full(len(names), np.nan)
    values = {
        kind: np.float32([distances[layer].get(kind, nothing)[named_clients] for layer in layers])
        for kind in _KINDS
    }
    # Names are stored as bytes, because those that come from files need not be valid text.
    clients = np.array([names[k].encode("utf-8", "surrogatepass") for k in named_clients])
    arrays = {"layers": np.array(layers), "clients": clients} | values
    _write_npz(folder / _FOLDER / f"{name}.npz", arrays)


def _distances(leaves: dict[tuple[str, ...], Any]) -> dict[str, dict[str, np.ndarray]]:
    """Returns layer -> kind -> distance f[K] of each client from the mean of all clients.

    Each is a root mean square over the layer's channels: for mean, of (mean_k - mean) / std, in
    standard deviations of the layer; for std, of log std_k minus its mean over clients; for scale
    and bias, of the difference from the mean.

    Args:
      leaves: (collection, ..., name) -> f[K, C], of batch norms.
    """

    def apart(rows: np.ndarray) -> np.ndarray:
        return np.sqrt(((rows - rows.mean(0)) ** 2).mean(1))

    distances: dict[str, dict[str, np.ndarray]] = {}
    leaves = {path: np.asarray(leaf, np.float64) for path, leaf in leaves.items()}
    for layer in (path[1:-1] for path in leaves if path[0] == STATISTICS):
        mean, var = (leaves.get((STATISTICS, *layer, part)) for part in ("mean", "var"))
        kinds = distances.setdefault("/".join(layer) or ".", {})
        if mean is not None and var is not None:
            kinds["mean"] = apart(mean / np.sqrt(var.mean(0) + _EPSILON))
            kinds["std"] = apart(np.log(var + _EPSILON) / 2)
        for kind in ("scale", "bias"):
            if (leaf := leaves.get((_PARAMS, *layer, kind))) is not None:
                kinds[kind] = apart(leaf)
    return distances


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
        values = {kind: stored[kind] for kind in _KINDS}
        clients = [
            name_bytes.decode("utf-8", "surrogatepass") for name_bytes in stored["clients"].tolist()
        ]
        return Distances(stored["layers"].tolist(), clients, values)
    except (ValueError, KeyError, AttributeError) as error:
        raise not_readable(path, error) from error


def _log_masks(experiment: Experiment, folder: Path, state: AnyState) -> Record:
    """Writes the masks of a round.

    `masks/ROUND.npz` has the names of the clients, and for each mask NAME f[K, C] and NAME.mean
    f[C], which an unseen client receives. For a population, the clients are those of the round's
    cohort.

    Returns:
      {"mask_l1": {client: L1 norm, "mean": their mean}}; a client's norm is the mean over its masks
      if it has several (FedCD, Fig. 3). With more clients than `clients_named`, or with a cohort,
      the entry is a summary (`training.evaluation.groups`). {} if there are no masks.
    """
    if not state.personal.get(COLLECTION):
        return {}
    limit = experiment.plan.clients_named
    masks, weights = _masks_of(experiment, state), np.asarray(state.weights)
    mean = {name: (weights[:, None] * mask).sum(0) / weights.sum() for name, mask in masks.items()}
    domains, state = _with_models(experiment, state)
    names = [domain.name for domain in domains]
    if len(names) < len(experiment.internal.domains):
        # Each cohort has other names, so only a summary is logged.
        masks, names, limit = _masks_of(experiment, state), [""] * len(names), 0
    if first():
        arrays = {"clients": np.array([domain.name for domain in domains])} | masks
        arrays |= {f"{name}.mean": mean[name] for name in masks}
        _write_npz(folder / "masks" / f"{int(state.round):04}.npz", arrays)
    # FedCD has one mask, of features, unless more layers are named.
    norms = np.mean([np.abs(mask).sum(1) for mask in masks.values()], axis=0)
    return {"mask_l1": by_client(names[: len(norms)], norms, limit)}


def _with_models(
    experiment: Experiment, state: AnyState
) -> tuple[tuple[Domain, ...], FederatedState]:
    """Returns the clients whose models are at hand, those of a cohort or all, and their state."""
    domains = experiment.internal.domains
    if not isinstance(state, PopulationState):
        return domains, state
    client = np.asarray(state.cohort)
    rows = state.rows_of(client, ("personal",))["personal"]
    cohort = state.state._replace(personal=rows, weights=np.zeros(len(client)))
    return tuple(domains[k] for k in client), cohort


def _draw_masks_of(experiment: Experiment, folder: Path, state: AnyState) -> None:
    """Draws what the masks of the first and the last client do to their features, if they do."""
    if FEATURES not in state.personal.get(COLLECTION, {}):
        return
    domains, state = _with_models(experiment, state)
    masks = _masks_of(experiment, state)[FEATURES]
    shown = sorted({0, len(domains) - 1})
    variables = gathered(client_variables(state), experiment.mesh)
    if not first():
        return
    features = {}  # name -> f[N, F] before the mask, of test images
    for k in shown:
        model = take(jax.device_get(jax.tree.map(lambda leaf, k=k: leaf[k], variables)))[0]
        test = domains[k].test
        split = select(test, np.arange(len(test.images))[:_SAMPLES])
        features[domains[k].name] = features_of(
            running, experiment.model, experiment.prepare, model, split, _SAMPLES
        )
    picture = folder / "plots" / "masked_features.png"
    write_picture(picture, lambda: masked_features(features, masks[shown]))


def _masks_of(experiment: Experiment, state: AnyState) -> dict[str, np.ndarray]:
    """Returns name -> masks f[K, F] without padding, readable by this process."""
    masks = jax.device_get(gathered(state.personal[COLLECTION], experiment.mesh))
    return jax.tree.map(lambda leaf: leaf[: len(state.weights)], masks)


def _write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    write_atomically(path, file.getvalue())
