"""A trained federation on any client with any adaptations, without training."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from fedjax_bn.adaptation import Adaptation, ensemble, record_alphas, with_clients
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.data.domain import Split, select
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.dtypes import parameter_dtype
from fedjax_bn.federation import FederatedState, client_variables, global_variables
from fedjax_bn.models.features import FeaturesOf
from fedjax_bn.run import checkpoint
from fedjax_bn.run.errors import CheckpointError
from fedjax_bn.run.evaluate import TestData, score_unseen, stack_batches
from fedjax_bn.sharing import Variables

Accuracies = dict[str, float]


def restore_state(folder: Path, like: FederatedState) -> tuple[FederatedState, int]:
    """The state of a run's selected round, or of its latest where none was selected, and its round.

    Args:
      folder: the run's workdir.
      like: a state of the same form, arrays or `jax.ShapeDtypeStruct`.

    Raises:
      CheckpointError: the folder has no checkpoint, or a damaged one, or one of another model.
    """
    for name in ("selected", "latest"):
        checkpoints = folder / "checkpoints" / name
        if not checkpoints.is_dir():
            continue
        with checkpoint.open_folder(checkpoints, keep=2) as manager:
            if manager.all_steps():
                return checkpoint.restore(manager, like), manager.latest_step()
    raise CheckpointError(f"{folder} holds no checkpoint: give the workdir of a run that has one")


def score_adaptations(
    model: nn.Module,
    prepare: Prepare,
    state: FederatedState,
    splits: Sequence[Split],
    choices: Sequence[str],
    batch_size: int = 32,
) -> list[Accuracies]:
    """Accuracy in percent of the global model on each client, a number for each choice.

    Args:
      model: linen module, images -> logits.
      prepare: stored images -> what the model reads.
      state: of the finished federation.
      splits: the samples of each client.
      choices: adaptations as `adaptation.choice.choose_adaptation` spells them.
      batch_size: of choices that name none.

    Raises:
      ValueError: a choice is unknown, or needs variables that the federation has not trained.
    """
    chosen = {text: choose_adaptation(text, model, batch_size) for text in choices}
    variables = served_variables(state, choices)
    scores = {text: score_unseen(choice.adaptation, prepare) for text, choice in chosen.items()}
    return [
        {
            text: float(scores[text](variables, stream(split, choice.batch_size, choice.order)))
            for text, choice in chosen.items()
        }
        for split in splits
    ]


def served_variables(state: FederatedState, choices: Sequence[str]) -> Variables:
    """What an unseen client receives; the clients' batch norms too where `ensemble` is chosen."""
    variables = global_variables(state)
    if any(text.partition(":")[0] == ensemble.__name__ for text in choices):
        return with_clients(variables, client_variables(state))
    return variables


def stream(split: Split, batch_size: int, order: int = 0) -> TestData:
    """A client's samples as one stream of batches, the last one padded.

    Args:
      split: the samples.
      batch_size: at least 1.
      order: seed of a random order; -1 for the order in which they lie, often sorted by class,
        which no tracked or batch statistics bear.
    """
    return stack_batches([in_order(split, order)], batch_size)


def in_order(split: Split, order: int) -> Split:
    """The split in the random order of a seed; as it is for -1."""
    if order < 0:
        return split
    return select(split, np.random.default_rng(order).permutation(len(split.labels)))


def alphas_of(
    model: nn.Module, prepare: Prepare, variables: Variables, split: Split, batch_size: int = 256
) -> dict[str, np.ndarray]:
    """Layer name -> alpha f[N] of every sample, in order (FedIG, Fig. 4a and 7 to 9)."""
    record = record_alphas(model)
    return _over_batches(prepare, variables, split, batch_size, record)


def features_of(
    make: Callable[[nn.Module], Adaptation],
    model: nn.Module,
    prepare: Prepare,
    variables: Variables,
    split: Split,
    batch_size: int = 256,
) -> np.ndarray:
    """Features f[N, F] before the classifier under an adaptation without carry (FedIG, Fig. 4b).

    Args:
      make: such as `adaptation.running` or `adaptation.zero_shot_adapter`.
      model: linen module.
      prepare: stored images -> what the model reads.
      variables: the collections that the adaptation needs.
      split: the samples.
      batch_size: samples of one pass.
    """
    adaptation = make(FeaturesOf(model))

    def features(variables: Variables, images: jax.Array) -> jax.Array:
        return adaptation.predict(variables, adaptation.init(variables), images)[0]

    return _over_batches(prepare, variables, split, batch_size, features)


def _over_batches(
    prepare: Prepare,
    variables: Variables,
    split: Split,
    batch_size: int,
    function: Callable[[Variables, jax.Array], Any],
) -> Any:
    """The function's outputs [B, ...] over all samples, one after the other [N, ...]."""
    data = stack_batches([split], batch_size)

    @jax.jit
    def run(variables: Variables, images: jax.Array) -> Any:
        dtype = parameter_dtype(variables)
        return jax.lax.map(lambda batch: function(variables, prepare(batch, dtype)), images)

    def joined(leaf: jax.Array) -> np.ndarray:
        return np.asarray(leaf).reshape(-1, *leaf.shape[2:])[: len(split.labels)]

    return jax.tree.map(joined, run(variables, data.images))
