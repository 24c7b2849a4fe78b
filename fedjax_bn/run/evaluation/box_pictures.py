"""What a detector's run shows at its end: test images with the boxes that it finds in them."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from fedjax_bn.adaptation import running
from fedjax_bn.adaptation.adaptation import Adaptation, of_clients
from fedjax_bn.data.domain import Split, select, whole
from fedjax_bn.data.label_trees import BOXES, CLASS, has_boxes
from fedjax_bn.detection.decode import PREDICTION, Detections, detect
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.federation import FederatedState, client_variables, global_variables
from fedjax_bn.report.found_boxes import Picture, found_boxes
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.files.workdir import write_atomically
from fedjax_bn.sharing import Variables

_Find = Callable[[Variables, np.ndarray], Detections]
IMAGES = 6  # of a client
CLIENTS = 8  # that are drawn, and as many unseen ones


def shows_boxes(experiment: Experiment) -> bool:
    """Whether a run's images have boxes."""
    return has_boxes(experiment.internal.domains[0].test.labels)


def draw_boxes(experiment: Experiment, folder: Path, state: FederatedState) -> None:
    """Writes `plots/boxes.png`: the first test images of clients, each by its own model.

    Unseen domains are served by what an unseen client receives, with its running statistics.
    """
    rule = experiment.method.statistics
    own = _finder(experiment, of_clients(experiment.model, rule))
    served = own if rule is None else _finder(experiment, running(experiment.model))
    variables, received = client_variables(state), global_variables(state)
    rows = {}
    for k, domain in enumerate(experiment.internal.domains[:CLIENTS]):
        mine = jax.tree.map(lambda leaf, k=k: leaf[k], variables)
        rows[domain.name] = _pictures(own, mine, domain.test)
    for domain in experiment.unseen[:CLIENTS]:
        rows[domain.name] = _pictures(served, received, whole(domain))
    dataset = experiment.internal
    names = dataset.classes or tuple(map(str, range(dataset.num_classes)))
    write_atomically(folder / "plots" / "boxes.png", found_boxes(rows, names))


def _finder(experiment: Experiment, adaptation: Adaptation) -> _Find:
    """Returns jitted `find(variables, stored images) -> detections`."""
    anchors = experiment.model.anchors

    @jax.jit
    def find(variables: Variables, images: jax.Array) -> Detections:
        read = experiment.prepare(images, parameter_dtype(variables))
        outputs, _ = adaptation.predict(variables, adaptation.init(variables), read)
        return detect(outputs, anchors, PREDICTION)

    return find


def _pictures(find: _Find, variables: Variables, split: Split) -> list[Picture]:
    """The first images of a split, and what a model finds in them."""
    first = select(split, np.arange(min(IMAGES, len(split.images))))
    images = np.asarray(first.images)
    found = jax.device_get(find(variables, images))
    true = first.labels[BOXES], first.labels[CLASS]
    return [Picture(*one) for one in zip(images, *found, *true, strict=True)]
