"""The augmentation of training images that a configuration names."""

from ml_collections import ConfigDict

from fedjax_bn.data.pixels import augment
from fedjax_bn.data.pixels.randaug import randaug
from fedjax_bn.ranges import Magnitude, Views, brief
from fedjax_bn.run.config import choice_of
from fedjax_bn.spelling import call_chosen


def _randaug(size: int, ops: Views = 2, magnitude: Magnitude = 9) -> augment.Augment:
    del size
    return randaug(ops, magnitude)


# `make(size, ...) -> augment`, with the side of the images that the model reads
AUGMENTATIONS = {
    "none": lambda size: None,
    "domainbed": augment.domainbed,
    "office": lambda size: augment.office(),
    "randaug": _randaug,
}


def choose_augmentation(config: ConfigDict) -> augment.Augment | None:
    """What `config.data.augment` spells, such as `randaug:magnitude=5`, or a user's own.

    Raises:
      ConfigError: an unknown name or key, or a value of the wrong type or out of its range.
    """
    text = config.data.augment
    make, options = choice_of("data.augment", text, AUGMENTATIONS, ("size",))
    what = f"config.data.augment={brief(text)}"
    return call_chosen(what, make, config.data.image_size, **options)
