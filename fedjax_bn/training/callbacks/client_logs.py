"""Writes what a run's report needs of its clients: distances of batch norms, and masks."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_bn.adaptation import running
from fedjax_bn.data.domain import select
from fedjax_bn.federation import FederatedState, client_variables
from fedjax_bn.models.feature_masks import COLLECTION, FEATURES
from fedjax_bn.normalization.calls import in_forward_order
from fedjax_bn.sharing import STATISTICS, path_names, without
from fedjax_bn.training.evaluation.answers import npz_bytes
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.mesh import gathered
from fedjax_bn.training.plots import features_of, masked_features
from fedjax_bn.training.population import AnyState, PopulationState
from fedjax_bn.training.processes import first
from fedjax_bn.training.records import Record, by_client, select_round, some_of
from fedjax_bn.training.start import sample_input
from fedjax_bn.training.workdir import read_arrays, write_atomically, write_picture

_KINDS = ("mean", "std", "scale", "bias")  # of batch norms, see `_distances`
_PARAMS = "params"
_EPSILON = 1e-5  # added to every variance, as in batch norm
_SAMPLES = 256  # test images of a client whose features are plotted


class ClientLogs(NamedTuple):
    """Writes distances of batch norms and masks to a workdir; adds `mask_l1` to the record."""

    experiment: Experiment
    folder: Path
    records: list[Record]

    def on_round_end(self, round: int, state: AnyState, metrics: Record) -> None:
        """Writes what the report needs of this round, unless clients' rows are on the host."""
        if isinstance(state, PopulationState):
            return
        metrics.update(_log_masks(self.experiment, self.folder, state))
        if round == 1:
            _log_batch_norms(self.experiment, self.folder, state, "first")
        if "accuracy" in metrics and select_round(self.records) == round:
            _log_batch_norms(self.experiment, self.folder, state, "selected")

    def on_train_end(self, round: int, state: AnyState, metrics: Record) -> None:
        """Draws what the masks of the first and the last client do to features of test images."""
        if isinstance(state, PopulationState) or FEATURES not in state.personal.get(COLLECTION, {}):
            return
        experiment, domains = self.experiment, self.experiment.internal.domains
        masks = _masks_of(experiment, state)[FEATURES]
        variables = gathered(client_variables(state), experiment.mesh)
        if not first():
            return
        shown, features = sorted({0, len(domains) - 1}), {}
        for k in shown:
            client_rows = jax.tree.map(lambda leaf, k=k: leaf[k], variables)
            model, test = without(jax.device_get(client_rows), COLLECTION), domains[k].test
            split = select(test, np.arange(len(test.images))[:_SAMPLES])
            features[domains[k].name] = features_of(
                running, experiment.model, experiment.prepare, model, split, _SAMPLES
            )
        picture = self.folder / "plots" / "masked_features.png"
        write_picture(picture, lambda: masked_features(features, masks[shown]))


def _log_batch_norms(
    experiment: Experiment, folder: Path, state: FederatedState, name: str
) -> None:
    """Writes `batch_norms/NAME.npz` for a state, if clients keep anything of their batch norms."""
    # The arrays are "layers", names in the order of the forward pass, "clients", and for each of
    # _KINDS the distances f[L, K] from the clients' mean, NaN where a layer shares or lacks a leaf.
    leaves = {path_names(path): leaf for path, leaf in jax.tree.leaves_with_path(state.personal)}
    norms = {path[1:-1] for path in leaves if path[0] == STATISTICS}
    norm_leaves = {
        path: leaf
        for path, leaf in leaves.items()
        if path[0] in (_PARAMS, STATISTICS) and path[1:-1] in norms and leaf.ndim == 2
    }
    norm_leaves = gathered(norm_leaves, experiment.mesh)
    if not norm_leaves or not first():
        return
    names = [domain.name for domain in experiment.internal.domains]
    shown = some_of(len(names), experiment.plan.clients_named)
    rows = {path: np.float64(np.asarray(leaf)[: len(names)]) for path, leaf in norm_leaves.items()}
    distances = {"/".join(norm) or ".": _distances(rows, norm) for norm in norms}
    variables = jax.eval_shape(lambda state: client_variables(state, 0), state)
    images = sample_input(experiment.internal, experiment.prepare, 2)
    layers = in_forward_order(distances, experiment.model, variables, images)
    nothing = np.full(len(names), np.nan)
    arrays = {
        kind: np.float32([distances[layer].get(kind, nothing)[shown] for layer in layers])
        for kind in _KINDS
    }
    arrays |= {"clients": np.array([names[k] for k in shown]), "layers": np.array(layers)}
    write_atomically(folder / "batch_norms" / f"{name}.npz", npz_bytes(arrays))


def _distances(rows: dict[tuple[str, ...], Any], norm: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Returns kind -> distance f[K] of each client from the mean of all clients, of one layer."""

    # A root mean square over channels of (mean_k - mean) / std, log std_k minus its mean over
    # clients, and the differences of scale and bias; `rows`: (collection, *norm, name) -> [K, C].
    def apart(rows: np.ndarray) -> np.ndarray:
        return np.sqrt(((rows - rows.mean(0)) ** 2).mean(1))

    kinds = {}
    mean, var = (rows.get((STATISTICS, *norm, part)) for part in ("mean", "var"))
    if mean is not None and var is not None:
        kinds["mean"] = apart(mean / np.sqrt(var.mean(0) + _EPSILON))
        kinds["std"] = apart(np.log(var + _EPSILON) / 2)
    for kind in ("scale", "bias"):
        if (leaf := rows.get((_PARAMS, *norm, kind))) is not None:
            kinds[kind] = apart(leaf)
    return kinds


def read_distances(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a workdir's `batch_norms/NAME.npz`; {} if it has none."""
    path = folder / "batch_norms" / f"{name}.npz"
    return read_arrays(path) if path.exists() else {}


def _log_masks(experiment: Experiment, folder: Path, state: FederatedState) -> Record:
    """Writes the masks of a round, and returns their L1 norms (FedCD, Fig. 3); {} without masks."""
    # `masks/ROUND.npz` has the names of the clients, and for each mask NAME f[K, C] and NAME.mean
    # f[C], which an unseen client receives.
    if not state.personal.get(COLLECTION):
        return {}
    masks, weights = _masks_of(experiment, state), np.asarray(state.weights)
    names = [domain.name for domain in experiment.internal.domains]
    if first():
        arrays = {"clients": np.array(names)} | masks
        for name, mask in masks.items():
            arrays[f"{name}.mean"] = (weights[:, None] * mask).sum(0) / weights.sum()
        write_atomically(folder / "masks" / f"{int(state.round):04}.npz", npz_bytes(arrays))
    # FedCD has one mask, of features, unless more layers are named; then the mean is over them.
    norms = np.mean([np.abs(mask).sum(1) for mask in masks.values()], axis=0)
    return {"mask_l1": by_client(names, norms, experiment.plan.clients_named)}


def _masks_of(experiment: Experiment, state: FederatedState) -> dict[str, np.ndarray]:
    masks = jax.device_get(gathered(state.personal[COLLECTION], experiment.mesh))
    return jax.tree.map(lambda leaf: leaf[: len(state.weights)], masks)
