"""The augmentation of training images that a configuration names."""

from ml_collections import ConfigDict

from fedjax_bn.arguments.choices import call_chosen
from fedjax_bn.arguments.ranges import Magnitude, Views
from fedjax_bn.arguments.text import brief
from fedjax_bn.client import Load, augmenting, changing
from fedjax_bn.data.domain import Dataset
from fedjax_bn.data.label_trees import has_boxes
from fedjax_bn.data.pixels import augment, box_augment
from fedjax_bn.data.pixels.randaug import randaug
from fedjax_bn.run.config.keys import choice_of
from fedjax_bn.run.errors import ConfigError


def _randaug(size: int, ops: Views = 2, magnitude: Magnitude = 9) -> augment.Augment:
    del size
    return randaug(ops, magnitude)


# `make(size, ...) -> augment`, with the side of the images that the model reads
AUGMENTATIONS = {
    "none": lambda size: None,
    "domainbed": augment.domainbed,
    "office": lambda size: augment.office(),
    "randaug": _randaug,
    "boxes": box_augment.of_boxes,
}


def choose_augmentation(config: ConfigDict) -> augment.Augment | box_augment.BoxAugment | None:
    """What `config.data.augment` spells, such as `randaug:magnitude=5`, or a user's own.

    Raises:
      ConfigError: an unknown name or key, or a value of the wrong type or out of its range.
    """
    text = config.data.augment
    make, options = choice_of("data.augment", text, AUGMENTATIONS, ("size",))
    what = f"config.data.augment={brief(text)}"
    return call_chosen(what, make, config.data.image_size, **options)


def choose_loading(config: ConfigDict, internal: Dataset) -> Load:
    """How a batch is found and augmented, its boxes too where images have some.

    Raises:
      ConfigError: the augmentation does not suit the labels.
    """
    change, boxed = choose_augmentation(config), has_boxes(internal.domains[0].train.labels)
    moves = isinstance(change, box_augment.BoxAugment)
    if change is not None and moves != boxed:
        have, remedy = ("boxes, which it would leave where they were", "boxes")
        if not boxed:
            have, remedy = "no boxes to move", "another"
        raise ConfigError(
            f"config.data.augment={brief(config.data.augment)} does not suit {internal.name}, "
            f"whose images have {have}: choose {remedy}, or none"
        )
    return changing(change.change) if moves else augmenting(change)
