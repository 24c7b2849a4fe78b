"""Builds the model of a configuration, its task, and how its images are loaded and augmented."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
from ml_collections import ConfigDict

from fedjax_bn import models
from fedjax_bn.arguments.choices import call_chosen, split_choice
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.ranges import AtLeast0
from fedjax_bn.arguments.text import brief
from fedjax_bn.client import Load, look_up
from fedjax_bn.data.domain import Dataset
from fedjax_bn.data.labels import BOXES, MASK, has_boxes, has_masks
from fedjax_bn.data.pixels import augment
from fedjax_bn.data.pixels.label_augment import of_boxes, of_masks
from fedjax_bn.local_step import Batch
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.normalization.calls import init_variables, shapes_of
from fedjax_bn.run.config.choices import choice_of, closed_choice
from fedjax_bn.task import Task, classification, segmentation
from fedjax_bn.tasks.detection import Recipe, detection

MODELS = {name: getattr(models, name) for name in models.__all__}
OF_CALLER = ("num_classes", "rngs", "name", "parent")  # set here; the last two by linen
_CLASS = ""  # the kind of labels without boxes or masks, as `augment.LabelAugment.moves` has it
# Kind of labels -> what an image has, the task, and models for it.
_KINDS = {
    _CLASS: ("one class", "classification", "a classifier, such as DigitCNN or ResNet18"),
    BOXES: ("boxes", "detection", "a detector, such as TinyDetector or YOLOv5n"),
    MASK: ("a mask", "segmentation", "UNet, or a network of logits [B, H, W, classes]"),
}


def _detection(anchors: Any, class_gain: AtLeast0 = 0.5) -> Task:
    """Finds boxes and their classes, by a network with anchors.

    Args:
      class_gain: Gain of classes in the loss, where boxes have 0.05.
    """
    return detection(anchors, recipe=Recipe(classes=class_gain))


TASKS: dict[str, Callable[..., Task]] = {
    "classification": classification,
    "detection": _detection,
    "segmentation": segmentation,
}


def choose_model(text: str, compute_dtype: str, seed: int, num_classes: int) -> Any:
    """Returns the network of `config.model`, such as `ResNet18:width=16`.

    A user's own model is `package.module:Class`, a linen module with a field `num_classes`, or an
    nnx module that takes `num_classes` and `rngs`, which come from the seed.
    """
    make, fields = choice_of("model", text, MODELS, *OF_CALLER)
    culprit = f"config.model={brief(text)}"
    arguments = fields | {"num_classes": num_classes}
    if isinstance(make, type) and _is_nnx(make):
        from flax.nnx import Rngs

        arguments["rngs"] = Rngs(seed)
    model = call_chosen(culprit, make, **arguments)
    if _is_nnx(type(model)):
        model = models.from_nnx(model)
    elif not isinstance(inspect.unwrap(model), nn.Module):
        raise ConfigError(f"{culprit} gives {type(model).__name__}, not a flax.linen or nnx.Module")
    return model if compute_dtype == "float32" else in_dtype(model, compute_dtype)


def _is_nnx(kind: type) -> bool:
    if issubclass(kind, nn.Module):
        return False  # without importing nnx, which takes long
    from flax.nnx import Module

    return issubclass(kind, Module)


def choose_task(config: ConfigDict, model: Any, internal: Dataset, images: jax.Array) -> Task:
    """Returns the task of the labels; a ConfigError if the model or `config.task` is for others."""
    kind = _kind_of(internal)
    _, task, models_for_it = _KINDS[kind]
    if kind != _made_for(config.model, model, images, internal.num_classes):
        raise _unsuited(f"config.model={brief(config.model)}", internal, models_for_it)
    name, options = closed_choice("task", config.task or task, TASKS, "classes")
    if name != task:
        raise _unsuited(f"config.task={name}", internal, task)
    if kind == BOXES:
        return _detection(model.anchors, **options)
    return TASKS[name](*[internal.num_classes] * (kind == MASK), **options)


def _unsuited(choice: str, data: Dataset, remedy: str) -> ConfigError:
    labels = _KINDS[_kind_of(data)][0]
    return ConfigError(
        f"{choice} does not suit {data.name}, whose images have {labels} each: choose {remedy}"
    )


def _made_for(text: str, model: Any, images: jax.Array, classes: int) -> str | None:
    """Returns the labels that a model is made for; None if its outputs are of no known form."""
    if getattr(model, "anchors", None) is not None:
        return BOXES
    # What a user's own model is made for shows in its outputs' shape: [B, C] or [B, H, W, C].
    name = split_choice(text, MODELS)[0]
    if name in MODELS:  # without a trace, which takes a second for deep networks
        return MASK if name == models.UNet.__name__ else _CLASS
    variables = jax.eval_shape(partial(init_variables, model), jax.random.key(0), images)
    shape = getattr(shapes_of(model, variables, images), "shape", ())
    if len(shape) == 2 and shape[1] < classes:
        outputs = f"{shape[1]} outputs for the {classes} classes"
        raise ConfigError(f"config.model={brief(text)} has {outputs}: make num_classes of them")
    return _CLASS if len(shape) == 2 else MASK if shape[:-1] == images.shape[:3] else None


def _kind_of(data: Dataset) -> str:
    labels = data.domains[0].train.labels
    return MASK if has_masks(labels) else BOXES if has_boxes(labels) else _CLASS


def _none() -> None:
    """Leaves the images as they are."""


# `make(...) -> augment`, or `make(size, ...)` with the side of the images that the model reads
AUGMENTATIONS: dict[str, Callable[..., Any]] = {
    **{make.__name__: make for make in (augment.domainbed, augment.office, augment.randaug)},
    **{"none": _none, "boxes": of_boxes, "masks": of_masks},
}


def choose_augmentation(text: str, size: int) -> augment.Augment | augment.LabelAugment | None:
    """Returns the augmentation that a text such as `randaug:magnitude=5` chooses."""
    make, options = choice_of("data.augment", text, AUGMENTATIONS, "size")
    if "size" in inspect.signature(make).parameters:
        options["size"] = size
    return call_chosen(f"config.data.augment={brief(text)}", make, **options)


def choose_loading(text: str, size: int, internal: Dataset) -> Load:
    """Returns the function that looks up a batch and augments its images, with boxes or masks."""
    change = choose_augmentation(text, size)
    if change is None:
        return look_up
    moved = change.moves if isinstance(change, augment.LabelAugment) else _CLASS
    if moved != _kind_of(internal):
        remedy = "none, boxes for boxes, or masks for masks"
        raise _unsuited(f"config.data.augment={brief(text)}", internal, remedy)

    def load(source: Any, batch: Batch, key: jax.Array) -> Batch:
        batch = look_up(source, batch, key)
        if isinstance(change, augment.LabelAugment):
            return change.change(key, batch)
        return batch | {"image": change(key, batch["image"])}

    return load
