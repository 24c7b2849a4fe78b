"""Builds a configuration's model, its task, and the augmentation of its training images."""

import inspect
from functools import partial
from typing import Any

import flax.linen as nn
import jax

from fedjax_bn import models
from fedjax_bn.arguments.choices import call_chosen, split_choice
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.ranges import Magnitude, Views
from fedjax_bn.arguments.text import brief
from fedjax_bn.client import Load, look_up
from fedjax_bn.data.domain import Dataset
from fedjax_bn.data.label_trees import BOXES, MASK, has_boxes, has_masks
from fedjax_bn.data.pixels import augment, label_augment
from fedjax_bn.local_step import Batch
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.normalization.calls import init_variables, shapes_of
from fedjax_bn.run.config.keys import choice_of
from fedjax_bn.task import Task, classification, segmentation
from fedjax_bn.tasks.detection import Recipe, detection

MODELS = {name: getattr(models, name) for name in models.__all__}
OF_CALLER = ("num_classes", "rngs", "name", "parent")  # set here; the last two by linen
_CLASS = ""  # the kind of labels without boxes or masks, as `augment.LabelAugment.moves` has it
_LABELS = {_CLASS: "one class", BOXES: "boxes", MASK: "a mask"}
_SUITABLE = {
    _CLASS: "a classifier, such as DigitCNN or ResNet18",
    BOXES: "a detector: TinyDetector, YOLOv5n, YOLOv5s or YOLOv5",
    MASK: "UNet, or a network of logits [B, H, W, classes]",
}


def choose_model(text: str, compute_dtype: str, seed: int, num_classes: int) -> Any:
    """Returns the network of `config.model`, such as `ResNet18:width=16`.

    A user's own model is `package.module:Class`, a linen module with a field `num_classes`, or an
    nnx module that takes `num_classes` and `rngs`, which come from the seed.
    """
    make, fields = choice_of("model", text, MODELS, OF_CALLER)
    culprit = f"config.model={brief(text)}"
    arguments = fields | {"num_classes": num_classes}
    if isinstance(make, type) and _is_nnx(make):
        from flax.nnx import Rngs

        arguments["rngs"] = Rngs(seed)
    model = call_chosen(culprit, make, **arguments)
    if _is_nnx(type(model)):
        model = models.from_nnx(model)
    elif not isinstance(inspect.unwrap(model), nn.Module):
        type_name = type(model).__name__
        raise ConfigError(f"{culprit} gives {type_name}, not a flax.linen.Module or nnx.Module")
    return model if compute_dtype == "float32" else in_dtype(model, compute_dtype)


def _is_nnx(kind: type) -> bool:
    if issubclass(kind, nn.Module):
        return False  # without importing nnx, which takes long
    from flax.nnx import Module

    return issubclass(kind, Module)


def choose_task(
    text: str, model: Any, internal: Dataset, images: jax.Array, recipe: Recipe, nested: bool
) -> Task:
    """Returns the task of the labels: `detection` of boxes, `segmentation`, or `classification`.

    Args:
      text, model: `config.model`, and the model that it made.
      internal: the clients that train it.
      images: f[B, ...], such as the model reads.
      recipe: the gains of a detector's loss.
      nested: whether each class of masks is inside the one before.

    Raises:
      ConfigError, ValueError: the model is not one for such labels, or cannot read the images.
    """
    kind = _kind_of(internal)
    if kind != _made_for(text, model, images, internal.num_classes):
        raise ConfigError(
            f"config.model={brief(text)} does not suit {internal.name}, whose images have "
            f"{_LABELS[kind]} each: choose {_SUITABLE[kind]}"
        )
    if kind == BOXES:
        return detection(model.anchors, recipe=recipe)
    return segmentation(internal.num_classes, nested=nested) if kind == MASK else classification()


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
        raise ConfigError(
            f"config.model={brief(text)} has {shape[1]} outputs for the {classes} classes of the "
            "data: make as many as its field num_classes says"
        )
    return _CLASS if len(shape) == 2 else MASK if shape[:-1] == images.shape[:3] else None


def _kind_of(data: Dataset) -> str:
    labels = data.domains[0].train.labels
    return MASK if has_masks(labels) else BOXES if has_boxes(labels) else _CLASS


def _none(size: int) -> None:
    """Leaves the images as they are."""
    del size


def _office(size: int) -> augment.Augment:
    """Turns and flips images at random, as FedBN's code does on Office-Caltech10."""
    del size
    return augment.office()


def _randaug(size: int, ops: Views = 2, magnitude: Magnitude = 9) -> augment.Augment:
    """Applies random operations to each image (RandAugment)."""
    del size
    return augment.randaug(ops, magnitude)


# `make(size, ...) -> augment`, with the side of the images that the model reads
AUGMENTATIONS = {
    "none": _none,
    "domainbed": augment.domainbed,
    "office": _office,
    "randaug": _randaug,
    "boxes": label_augment.of_boxes,
    "masks": label_augment.of_masks,
}


def choose_augmentation(text: str, size: int) -> augment.Augment | augment.LabelAugment | None:
    """Returns the augmentation that a text such as `randaug:magnitude=5` chooses."""
    make, options = choice_of("data.augment", text, AUGMENTATIONS, ("size",))
    return call_chosen(f"config.data.augment={brief(text)}", make, size, **options)


def choose_loading(text: str, size: int, internal: Dataset) -> Load:
    """Returns the function that looks up a batch and augments its images, with boxes or masks."""
    change = choose_augmentation(text, size)
    if change is None:
        return look_up
    moved = change.moves if isinstance(change, augment.LabelAugment) else _CLASS
    if moved != (kind := _kind_of(internal)):
        remedy = {_CLASS: "another", BOXES: "boxes", MASK: "masks"}[kind]
        raise ConfigError(
            f"config.data.augment={brief(text)} does not suit {internal.name}, whose images have "
            f"{_LABELS[kind]} each: choose {remedy}, or none"
        )

    def changed(key: jax.Array, batch: Batch) -> Batch:
        if moved:
            return change.change(key, batch)
        return batch | {"image": change(key, batch["image"])}

    return lambda source, batch, key: changed(key, look_up(source, batch, key))
