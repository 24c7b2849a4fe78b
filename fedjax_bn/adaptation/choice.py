"""From the text of a configuration to an adaptation and the stream that it is tested on."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from fedjax_bn import adaptation as made
from fedjax_bn.adaptation.adaptation import Adaptation, without_affine, without_mask
from fedjax_bn.arguments.choices import Argument, call_chosen, parsed, read_choice, split_choice
from fedjax_bn.arguments.ranges import ORDER, SAMPLES
from fedjax_bn.arguments.text import brief

ADAPTATIONS = {
    make.__name__: make
    for make in (
        *(made.running, made.batch, made.initial, made.tsmobn, made.zero_shot_adapter),
        *(made.fixed_alpha, made.random_alpha, made.learned_alpha),
        *(made.ensemble, made.iabn, made.mixnorm),
    )
}
# Adaptations that need something trained, and what trains it.
NEEDS = {
    "zero_shot_adapter": "the zero-shot adapter needs method=fediga",
    "learned_alpha": "learned gates need method=fedig with fedig.gates=True, or method=copa",
}
STREAM = {
    "affine": Argument(bool, True),
    "mask": Argument(bool, True),
    "batch_size": Argument(int, 32, SAMPLES),
    "order": Argument(int, 0, ORDER),
}


class Choice(NamedTuple):
    """An adaptation with the stream it is tested on.

    Attributes:
      adaptation: (init, predict).
      batch_size: samples of a batch, at least 1.
      order: seed of the random order of the stream; -1 for the order of storage.
    """

    adaptation: Adaptation
    batch_size: int
    order: int


def choose_adaptation(text: str, model: Any, batch_size: int = 32) -> Choice:
    """Builds the adaptation of a text `name:key=value`, such as `tsmobn:momentum=0.5:order=3`.

    Keys are the adaptation's own arguments (`momentum`, `about`, `alpha`, `strength`, `weight`,
    `views`, `seed`) and, for all, `batch_size`, `order`, `affine` (False: scale 1, bias 0) and
    `mask` (False: without the masks that a method such as FedCD has trained). One's own adaptation
    is `package.module:function`, a function `(model, *, ...) -> Adaptation`.

    `order` is the seed of the random order in which `evaluate`, `predict` and a predictor pass a
    client's samples, 0 by default: the same samples give the same probabilities in all of them. -1
    keeps the order of storage, which is the order of paths for image files and that of the array
    otherwise. Stored samples are often sorted by class, and batches of one class mislead every
    adaptation that takes statistics of batches.

    Args:
      text: the choice; the name alone takes all defaults.
      model: as in `adaptation.stateless`, images -> logits.
      batch_size: the default one.

    Raises:
      ValueError: an unknown name or key, or a value of the wrong type; it lists the valid ones.
    """
    what = f"adaptation {brief(text)}"
    make, options = read_choice(what, text, ADAPTATIONS, extra=STREAM)
    stream = {key: argument.default for key, argument in STREAM.items()}
    stream["batch_size"] = batch_size
    stream |= {key: options.pop(key) for key in set(options) & set(stream)}
    adaptation = call_chosen(what, make, model, **options)
    if not isinstance(adaptation, Adaptation):
        raise ValueError(f"{what} gives {type(adaptation).__name__}, not an Adaptation")
    adaptation = adaptation if stream["affine"] else without_affine(adaptation)
    adaptation = adaptation if stream["mask"] else without_mask(adaptation)
    return Choice(adaptation, stream["batch_size"], stream["order"])


def varied(texts: Iterable[str]) -> dict[tuple[str, str], dict[Any, str]]:
    """Returns what a list of choices varies alone, such as the momenta of tsmobn.

    At least three values of a number count, or `affine=False` beside the same without it.

    Returns:
      (name, key) -> value -> text.
    """
    found: dict[tuple[str, str, tuple[str, ...]], dict[Any, str]] = {}
    for text in texts:
        name, changes = split_choice(text, ADAPTATIONS)
        if not any(change.startswith("affine=") for change in changes):
            found.setdefault((name, "affine", tuple(changes)), {})["with affine"] = text
        for change in changes:
            key, _, written = change.partition("=")
            others = tuple(other for other in changes if other != change)
            value = "without affine" if key == "affine" else parsed(written)
            found.setdefault((name, key, others), {})[value] = text
    return {
        (name, key): values
        for (name, key, _), values in found.items()
        if len(values) >= (2 if key == "affine" else 3)
    }
