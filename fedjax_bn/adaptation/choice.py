"""Turns the text of a configuration into an adaptation and the order and size of its batches."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from fedjax_bn import adaptation as made
from fedjax_bn.adaptation.adaptation import Adaptation, following, without_affine, without_mask
from fedjax_bn.arguments.choices import Argument, call_chosen, parsed, read_choice, split_choice
from fedjax_bn.arguments.ranges import ORDER, SAMPLES
from fedjax_bn.arguments.text import brief

ADAPTATIONS = {
    make.__name__: make
    for make in (
        *(made.running, made.batch, made.initial, made.tsmobn, made.zero_shot_adapter),
        *(made.fixed_alpha, made.random_alpha, made.learned_alpha),
        *(made.ensemble, made.iabn, made.mixnorm),
        *(made.tent, made.sar, made.shot, made.t3a, made.atp),
    )
}
# Adaptations that need trained parameters -> how to train them.
NEEDS = {
    "zero_shot_adapter": "the zero-shot adapter needs method=fediga",
    "learned_alpha": "learned gates need method=fedig:gates=True, or method=copa",
}
STREAM = {
    "affine": Argument(bool, True),
    "mask": Argument(bool, True),
    "batch_size": Argument(int, 32, SAMPLES),
    "order": Argument(int, 0, ORDER),
}


class Choice(NamedTuple):
    """An adaptation, with the size and order of the batches that it is tested on."""

    adaptation: Adaptation
    batch_size: int
    order: int  # seed of the random order of the samples; -1 for the order of storage


def choose_adaptation(choice: str, model: Any, batch_size: int = 32) -> Choice:
    """Builds the adaptation of a text `name:key=value`, such as `tsmobn:momentum=0.5:order=3`.

    Keys are the adaptation's own arguments, such as `momentum` of tsmobn. Every adaptation also
    takes `batch_size`, `order`, `affine` (False: scale 1, bias 0) and `mask` (False: without the
    masks that a method such as FedCD has trained). A user's own adaptation is
    `package.module:function`, a function `(model, *, ...) -> Adaptation`.

    `order`, 0 by default, is the seed of the random order in which a client's samples pass. -1
    keeps the order of storage, which is often by class: batches of one class mislead adaptations
    that use statistics of batches. `batch_size` counts if the text has none. An unknown name or
    key, or a value of a wrong type, raises ValueError.
    """
    named = f"adaptation {brief(choice)}"
    make, options = read_choice(named, choice, ADAPTATIONS, extra=STREAM)
    stream = {key: argument.default for key, argument in STREAM.items()}
    stream["batch_size"] = batch_size
    # What is left are the adaptation's own arguments.
    stream |= {key: options.pop(key) for key in set(options) & set(stream)}
    adaptation = call_chosen(named, make, model, **options)
    if not isinstance(adaptation, Adaptation):
        raise ValueError(f"{named} gives {type(adaptation).__name__}, not an Adaptation")
    adaptation = adaptation if stream["affine"] else without_affine(adaptation)
    adaptation = adaptation if stream["mask"] else without_mask(adaptation)
    return Choice(following(adaptation), stream["batch_size"], stream["order"])


def varied(texts: Iterable[str]) -> dict[tuple[str, str], dict[Any, str]]:
    """Returns (name, key) -> value -> text of choices that differ in one argument alone.

    A group needs at least three values, except `affine`, which needs two: with and without.
    """
    groups: dict[tuple[str, str, tuple[str, ...]], dict[Any, str]] = {}
    for choice in texts:
        name, changes = split_choice(choice, ADAPTATIONS)
        if not any(change.startswith("affine=") for change in changes):
            groups.setdefault((name, "affine", tuple(changes)), {})["with affine"] = choice
        for change in changes:
            key, _, written = change.partition("=")
            fixed = tuple(entry for entry in changes if entry != change)
            value = "without affine" if key == "affine" else parsed(written)
            groups.setdefault((name, key, fixed), {})[value] = choice
    return {
        (name, key): values
        for (name, key, _), values in groups.items()
        if len(values) >= (2 if key == "affine" else 3)
    }
