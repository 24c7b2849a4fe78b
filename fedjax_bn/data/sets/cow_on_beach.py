"""Real digits on coloured ground, whose colour mostly shows the digit, but not everywhere.

The cow on the beach of Beery, Van Horn & Perona (ECCV 2018): a model that has seen cows only on
grass has learned the grass. Here the cows are scikit-learn's handwritten digits (see `scanners`),
each with a ground of its own colour. Four clients show a digit on its own ground or on one drawn
from all ten; they also differ in light. Two more places show what the model has learned:

    meadow, pasture, heath, marsh   the digit's own ground in 91, 82, 73 and 64 % of the images:
                                    with probability 0.9, 0.8, 0.7 and 0.6, and else any of the ten
    zoo                             any ground: the colour shows nothing
    beach                           always the ground of the digit five further: it misleads

A model that reads the writing is as good in the zoo and on the beach as on the meadow.
"""

import colorsys
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.division.partition import stratified_split
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.sets.scanners import place, share_out_scans, to_pixels

_CLASSES = 10
_INK, _OPACITY, _NOISE = 245.0, 0.9, 8.0  # grey level, share of ink in a stroke, sensor noise
_COLOURS = np.array([colorsys.hsv_to_rgb(c / _CLASSES, 0.75, 0.8) for c in range(_CLASSES)]) * 255


class _Place(NamedTuple):
    name: str
    fixed: float  # probability of the fixed ground; otherwise one of the ten is drawn
    further: int  # the fixed ground belongs to the digit so many further
    light: float  # brightness, 1 for full
    images: int  # number of its scans


_PLACES = (
    _Place("meadow", 0.9, 0, 1.0, 320),
    _Place("pasture", 0.8, 0, 0.9, 320),
    _Place("heath", 0.7, 0, 0.8, 320),
    _Place("marsh", 0.6, 0, 0.7, 320),
    _Place("zoo", 0.0, 0, 0.85, 258),
    _Place("beach", 1.0, 5, 0.85, 259),
)


def load_cow_on_beach(seed: int = 0) -> Dataset:
    """Returns "cow_on_beach": six domains of u8[N, 28, 28, 3] in ten classes, 70 to test each."""
    shares, domains = share_out_scans(seed, [scene.images for scene in _PLACES]), []
    for scene, (ink, labels, rng) in zip(_PLACES, shares, strict=True):
        drawn = rng.integers(_CLASSES, size=len(labels))
        is_fixed = rng.uniform(size=len(labels)) < scene.fixed
        ground = np.where(is_fixed, (labels + scene.further) % _CLASSES, drawn)
        stroke = _OPACITY * place(ink, rng)[..., None]
        seen = scene.light * (stroke * _INK + (1 - stroke) * _COLOURS[ground][:, None, None])
        images = to_pixels(seen + _NOISE * rng.standard_normal(seen.shape))
        parts = stratified_split(labels, [len(labels) - 100, 30, 70], rng)
        domains.append(Domain(scene.name, *(Split(images[p], labels[p]) for p in parts)))
    return Dataset("cow_on_beach", _CLASSES, tuple(domains), mean=(0.5,) * 3, std=(0.5,) * 3)


def ground_of(images: np.ndarray) -> np.ndarray:
    """Returns the numbers i64[N] of the grounds of images u8[N, 28, 28, 3], in any light."""
    border = images[:, [0, 1, -2, -1]].reshape(len(images), -1, 3)
    # light scales a colour, so only its direction counts; `argmax` needs no norm of `seen`
    seen = np.median(border.astype(np.float64), axis=1)
    return (seen @ (_COLOURS / np.linalg.norm(_COLOURS, axis=-1, keepdims=True)).T).argmax(1)
