"""Computes features, alphas of the adapter, and pictures with boxes, of single samples."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from fedjax_bn.adaptation import Adaptation, record_alphas, running
from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.data.domain import Dataset, Split, scored_part, select, whole
from fedjax_bn.data.label_trees import BOXES, CLASS, has_boxes
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.images import Prepare
from fedjax_bn.federation import FederatedState, client_variables, global_variables
from fedjax_bn.models.classifier import FeaturesOf
from fedjax_bn.normalization.calls import in_forward_order
from fedjax_bn.sharing import Variables
from fedjax_bn.tasks.detection import PREDICTION, detect
from fedjax_bn.tasks.detection.found_boxes import BoxPicture, found_boxes
from fedjax_bn.training.evaluation.scoring import SplitBatches
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.workdir import write_picture

_IMAGES = 6  # of a client
_CLIENTS = 8  # internal clients, and at most as many unseen ones


def alphas_of(
    model: nn.Module, prepare: Prepare, variables: Variables, split: Split, batch_size: int = 256
) -> dict[str, np.ndarray]:
    """Returns layer -> alpha f[N] of every sample, in forward order (FedIG, Fig. 4a, 7 to 9)."""
    alphas = _over_batches(prepare, variables, split, batch_size, record_alphas(model))
    images = prepare(jax.numpy.asarray(split.images[:2]), parameter_dtype(variables))
    return {name: alphas[name] for name in in_forward_order(alphas, model, variables, images)}


def features_of(
    make: Callable[[nn.Module], Adaptation],
    model: nn.Module,
    prepare: Prepare,
    variables: Variables,
    split: Split,
    batch_size: int = 256,
) -> np.ndarray:
    """Returns features f[N, F] before the classifier (FedIG, Fig. 4b).

    `make` is model -> adaptation without carry, such as `adaptation.running`.
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
    """Returns the function's outputs for all samples, joined: arrays [N, ...]."""

    @jax.jit
    def run(variables: Variables, images: jax.Array) -> Any:
        dtype = parameter_dtype(variables)
        return jax.lax.map(lambda batch: function(variables, prepare(batch, dtype)), images)

    outputs = run(variables, SplitBatches([split], batch_size).all_at_once().images)
    return jax.tree.map(
        lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:])[: len(split.images)], outputs
    )


def shows_boxes(experiment: Experiment) -> bool:
    """Returns whether the labels of a run's images are boxes."""
    return has_boxes(experiment.internal.domains[0].test.labels)


def draw_boxes(experiment: Experiment, folder: Path, state: FederatedState) -> None:
    """Writes `plots/boxes.png`, the first tested images with the boxes that a detector finds.

    Internal clients predict with their own models, by the method's rule. Unseen domains predict
    with what an unseen client receives, by the received running statistics.
    """

    @partial(jax.jit, static_argnums=0)
    def find(adaptation: Adaptation, variables: Variables, images: jax.Array) -> Any:
        read = experiment.prepare(images, parameter_dtype(variables))
        outputs, _ = adaptation.predict(variables, adaptation.init(variables), read)
        return detect(outputs, experiment.model.anchors, PREDICTION)

    def pictures(adaptation: Adaptation, variables: Variables, split: Split) -> list[BoxPicture]:
        samples_shown = select(split, np.arange(min(_IMAGES, len(split.images))))
        images = np.asarray(samples_shown.images)
        boxes = jax.device_get(find(adaptation, variables, images))
        true = samples_shown.labels[BOXES], samples_shown.labels[CLASS]
        return [BoxPicture(*arrays) for arrays in zip(images, *boxes, *true, strict=True)]

    def draw() -> bytes:
        rule, dataset, rows = experiment.method.statistics, experiment.internal, {}
        by_rule = of_clients(experiment.model, rule)
        served = by_rule if rule is None else running(experiment.model)
        for k, domain in enumerate(dataset.domains[:_CLIENTS]):
            name = of_part(domain.name, scored_part([domain]))
            rows[name] = pictures(by_rule, client_variables(state, k), domain.test)
        for domain in experiment.unseen[:_CLIENTS]:
            rows[domain.name] = pictures(served, global_variables(state), whole(domain))
        return found_boxes(rows, class_names(dataset))

    write_picture(folder / "plots" / "boxes.png", draw)


def of_part(name: str, part: str) -> str:
    """Returns a client's name, with the part of its samples if these are not test samples."""
    return name if part == "test" else f"{name} ({part})"


def class_names(dataset: Dataset) -> tuple[str, ...]:
    """Returns the names of the classes, or their numbers as text."""
    return dataset.classes or tuple(map(str, range(dataset.num_classes)))
