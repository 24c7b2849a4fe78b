"""What a run keeps of its clients' masks, if they have any: arrays, norms, a picture."""

import io
from pathlib import Path

import jax
import numpy as np

from fedjax_bn.adaptation import running
from fedjax_bn.data.domain import select
from fedjax_bn.federation import FederatedState, client_variables
from fedjax_bn.models.masks import COLLECTION, FEATURES, take
from fedjax_bn.report.plots import masked_features
from fedjax_bn.run.evaluation.groups import by_client
from fedjax_bn.run.evaluation.per_sample import features_of
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.files.workdir import write_atomically
from fedjax_bn.run.processes.mesh import gathered
from fedjax_bn.run.processes.together import first
from fedjax_bn.run.training.population import Held, rows_of_clients
from fedjax_bn.run.training.records import Record

_SAMPLES = 256  # of a client, whose features are drawn


def log_masks(
    experiment: Experiment,
    folder: Path,
    state: FederatedState | Held,
    last: bool = False,
    limit: int = 100,
) -> Record:
    """Writes the masks of a round, and after the last one a picture of what they do.

    `masks/ROUND.npz` holds, for each mask, NAME f[K, C] and NAME.mean f[C], which an unseen client
    receives, and the names of the clients. `plots/masked_features.png` shows the first and the last
    client. The clients of a population are those of the round's cohort.

    Returns:
      {"mask_l1": {client: L1 norm, "mean": their mean}}, the mean over a client's masks if it has
      several (FedCD, Fig. 3). Of more than `limit` clients, or of a cohort, it is a summary
      (`run.evaluation.groups`). {} if there are no masks.
    """
    if not state.personal.get(COLLECTION):
        return {}
    domains = experiment.internal.domains
    masks, weights = _masks_of(experiment, state), np.asarray(state.weights)
    mean = {name: (weights[:, None] * mask).sum(0) / weights.sum() for name, mask in masks.items()}
    names = [domain.name for domain in domains]
    if isinstance(state, Held):  # its only row was the mean
        client = np.asarray(state.client)
        rows = rows_of_clients(state, client, ("personal",))["personal"]
        domains = [domains[k] for k in client]
        state = state.state._replace(personal=rows, weights=np.zeros(len(client)))
        names, limit = [""] * len(names), 0  # each round's cohort has other names: no names
        masks = _masks_of(experiment, state)
    if first():
        arrays = {"clients": np.array([domain.name for domain in domains])} | masks
        file = io.BytesIO()
        np.savez_compressed(file, **arrays, **{f"{name}.mean": mean[name] for name in masks})
        write_atomically(folder / "masks" / f"{int(state.round):04}.npz", file.getvalue())
    if last and FEATURES in masks:
        two = sorted({0, len(domains) - 1})
        variables = gathered(client_variables(state), experiment.mesh)
        if first():
            features = {}  # name -> f[N, F] before the mask, of test images
            for k in two:
                own = take(jax.device_get(jax.tree.map(lambda leaf, k=k: leaf[k], variables)))[0]
                some = select(domains[k].test, np.arange(len(domains[k].test.images))[:_SAMPLES])
                given = experiment.model, experiment.prepare, own, some, _SAMPLES
                features[domains[k].name] = features_of(running, *given)
            image = masked_features(features, masks[FEATURES][two])
            write_atomically(folder / "plots" / "masked_features.png", image)
    norms = np.mean([np.abs(mask).sum(1) for mask in masks.values()], axis=0)
    return {"mask_l1": by_client(names[: len(norms)], norms, limit)}


def _masks_of(experiment: Experiment, state: FederatedState | Held) -> dict[str, np.ndarray]:
    """Returns name -> masks f[K, F], where this process can read them, without padding."""
    masks = jax.device_get(gathered(state.personal[COLLECTION], experiment.mesh))
    return jax.tree.map(lambda leaf: leaf[: len(state.weights)], masks)
