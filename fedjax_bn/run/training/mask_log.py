"""What a run keeps of its clients' masks, where they have any: arrays, norms, a picture."""

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
from fedjax_bn.sharing import Variables

SAMPLES = 256  # of a client, whose features are drawn


def log_masks(
    experiment: Experiment,
    folder: Path,
    state: FederatedState | Held,
    last: bool = False,
    limit: int = 100,
) -> Record:
    """Writes the masks of a round, and after the last one a picture of what they do.

    `masks/ROUND.npz` holds, for each mask, NAME f[K, C] and NAME.mean f[C], what an unseen client
    receives, and the names of the clients. `plots/masked_features.png` shows the first and the last
    client. Of a population they are those of the round's cohort.

    Returns:
      {"mask_l1": {client: L1 norm, "mean": their mean}}, over several masks of a client their mean
      (FedCD, Fig. 3), and of more than `limit` clients, or of a cohort, a summary (`run.groups`);
      {} where there are no masks.
    """
    if not state.personal.get(COLLECTION):
        return {}
    names = [domain.name for domain in experiment.internal.domains]
    masks, weights = _masks_of(experiment, state), np.asarray(state.weights)
    mean = {name: (weights[:, None] * mask).sum(0) / weights.sum() for name, mask in masks.items()}
    if isinstance(state, Held):  # whose only row was the mean
        experiment, state, limit = *_of_cohort(experiment, state), 0
        names = [""] * len(names)  # another cohort has other names, which a record must not have
        masks = _masks_of(experiment, state)
    domains = experiment.internal.domains
    path = folder / "masks" / f"{int(state.round):04}.npz"
    if first():
        write_atomically(path, _packed([domain.name for domain in domains], masks, mean))
    if last and FEATURES in masks:
        two = sorted({0, len(domains) - 1})
        models = _models_of(experiment, state, two)
        if first():
            image = masked_features(_features_of(experiment, models, two), masks[FEATURES][two])
            write_atomically(folder / "plots" / "masked_features.png", image)
    norms = np.mean([np.abs(mask).sum(1) for mask in masks.values()], axis=0)
    return {"mask_l1": by_client(names[: len(norms)], norms, limit)}


def _masks_of(experiment: Experiment, state: FederatedState | Held) -> dict[str, np.ndarray]:
    """Name -> masks f[K, F], where this process can read them, without rows of padding."""
    masks = jax.device_get(gathered(state.personal[COLLECTION], experiment.mesh))
    return jax.tree.map(lambda leaf: leaf[: len(state.weights)], masks)


def _of_cohort(experiment: Experiment, held: Held) -> tuple[Experiment, FederatedState]:
    """The experiment and the state of a round's cohort alone."""
    client = np.asarray(held.client)
    rows = rows_of_clients(held, client, ("personal",))["personal"]
    domains = tuple(experiment.internal.domains[k] for k in client)
    internal = experiment.internal._replace(domains=domains)
    state = held.state._replace(personal=rows, weights=np.zeros(len(client)))
    return experiment._replace(internal=internal), state


def _packed(names: list[str], masks: dict[str, np.ndarray], mean: dict[str, np.ndarray]) -> bytes:
    """The content of `masks/ROUND.npz`."""
    arrays = {"clients": np.array(names)}
    for name, mask in masks.items():
        arrays |= {name: mask, f"{name}.mean": mean[name]}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _models_of(
    experiment: Experiment, state: FederatedState, clients: list[int]
) -> list[Variables]:
    """The collections of some clients, where this process can read them."""
    variables = gathered(client_variables(state), experiment.mesh)
    models = [jax.tree.map(lambda leaf, k=k: leaf[k], variables) for k in clients]
    return models if experiment.mesh is None else jax.device_get(models)


def _features_of(
    experiment: Experiment, models: list[Variables], clients: list[int]
) -> dict[str, np.ndarray]:
    """Name -> features f[N, F] before the mask, of some clients' own test images."""
    domains, found = experiment.internal.domains, {}
    for k, variables in zip(clients, models, strict=True):
        own = take(variables)[0]
        some = select(domains[k].test, np.arange(min(SAMPLES, len(domains[k].test.images))))
        model, prepare = experiment.model, experiment.prepare
        found[domains[k].name] = features_of(running, model, prepare, own, some, SAMPLES)
    return found
