"""What a configuration's model learns from its data: classes, or boxes where images have some."""

from typing import Any

from ml_collections import ConfigDict

from fedjax_bn.arguments.text import brief
from fedjax_bn.data.domain import Dataset
from fedjax_bn.data.label_trees import has_boxes
from fedjax_bn.detection import Recipe, detection
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.task import Task, classification


def choose_task(config: ConfigDict, model: Any, internal: Dataset) -> Task:
    """`detection` with `config.detection` where images have boxes, else `classification`.

    Raises:
      ConfigError: images have boxes and the model is no detector, or the other way round.
    """
    boxed, anchors = has_boxes(internal.domains[0].train.labels), getattr(model, "anchors", None)
    if boxed != (anchors is not None):
        what, remedy = ("one class", "a classifier, such as DigitCNN or ResNet18")
        if boxed:
            what, remedy = ("boxes", "a detector: TinyDetector, YOLOv5n, YOLOv5s or YOLOv5")
        raise ConfigError(
            f"config.model={brief(config.model)} does not suit {internal.name}, whose images have "
            f"{what} each: choose {remedy}"
        )
    if not boxed:
        return classification()
    keys = config.detection
    recipe = Recipe(box=keys.box, objectness=keys.objectness, classes=keys.classes)
    return detection(anchors, recipe=recipe, score=keys.score)


def option_of(task: Task) -> dict[str, Task]:
    """What a method is given of a task: nothing where it is what methods learn anyway."""
    return {} if task.classifies else {"task": task}
