"""Defines `Experiment`, all that a run needs, and how clients adapt before they are tested."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from fedjax_bn.adaptation.choice import Choice
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.division.partition import number_groups
from fedjax_bn.data.domain import Dataset, Domain, Split, select, splits, whole
from fedjax_bn.data.sampling import Sampler, by_epochs, by_steps
from fedjax_bn.engine.images import Prepare
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods.perfedavg import personalize
from fedjax_bn.task import Task, classification
from fedjax_bn.training.workdir import Record


class Personalization(NamedTuple):
    """How a client adapts before its test: by a gradient step on some labelled samples.

    Per-FedAvg (Fallah et al. 2020) trains a start for this, and UniFed tests it (4.1.2, 4.1.3). The
    samples are drawn from the evaluated split, by `seed`, and never count in the accuracy.
    """

    samples: int
    rate: float
    seed: int


class Participation(NamedTuple):
    """Who takes part in the rounds of a run."""

    drawn: int = 0  # clients drawn for a round; 0 for all
    draw: str = "uniform"  # "uniform", or "by_size" in proportion to their samples
    dropout: float = 0.0  # probability that a drawn client drops out of the round
    trace: np.ndarray | None = None  # as `availability.read_trace` returns it
    # whether the clients' own parts are kept on the host, see `training.population`
    on_host: bool = False


class LocalWork(NamedTuple):
    """A client's training in a round: `steps` if above 0, else `epochs`, one number or one each."""

    batch_size: int
    steps: int
    epochs: tuple[int, ...]

    def sampler(self, smallest: int, longest: int) -> Sampler:
        """Returns what draws the samples of a round; the numbers are of samples of a client."""
        if self.steps:
            return by_steps(self.batch_size, self.steps, smallest)
        return by_epochs(min(self.batch_size, longest), self.epochs)


class Plan(NamedTuple):
    """What the loop over rounds does and writes; other fields mean what their keys mean."""

    method: str
    seed: int
    rounds: int
    patience: int = 0
    eval_every: int = 5
    checkpoint_every: int = 5
    on_nonfinite: str = "stop"
    clients_named: int = 100
    predictions: str = ""
    profile: int = 0
    device_megabytes: int = 4000  # data up to this size stay on the device
    model: str = ""
    start_from: str = ""
    pretrained: str = ""
    # dotted key -> value of the whole configuration, as config.json has it
    keys: Mapping[str, Any] = MappingProxyType({})
    # the key whose schedule depends on the number of rounds, see `method.follows_rounds`
    follows: str = ""
    # `privacy(rounds)` returns the record of `describe_privacy` after that many rounds
    privacy: Callable[[int], Record] = lambda rounds: {}


class Evaluation(NamedTuple):
    """How clients are tested; other fields mean what their keys mean."""

    batch_size: int = 500
    clients: int = 0  # how many are evaluated, drawn from `seed`; 0 for all
    seed: int = 0
    eval_also: tuple[str, ...] = ("unseen",)
    validate_with: str = "own"
    statistics: str = "running"
    # how a client adapts first; None if clients do not adapt
    personalization: Personalization | None = None


class Experiment(NamedTuple):
    """Everything that a run reads from the configuration, built and checked."""

    model: Any  # a linen module, or what `models.from_nnx` or `models.precision.in_dtype` makes
    method: FederatedMethod
    internal: Dataset  # the clients, as the domains of a dataset
    unseen: tuple[Domain, ...]  # the domains that do not train
    prepare: Prepare  # stored images -> what the model reads
    adaptations: dict[str, Choice]  # text -> how unseen clients predict
    notes: tuple[str, ...]  # messages for the user about the data and the start
    participation: Participation
    work: LocalWork
    plan: Plan
    evaluation: Evaluation = Evaluation()
    # the devices over which the method's clients are shared out; None for one
    mesh: Mesh | None = None
    task: Task = classification()
    validates: str = ""  # the key that needs validation samples during training; "" for none

    def train_sizes(self) -> list[int]:
        """Returns the numbers of the clients' training samples."""
        return [len(domain.train.images) for domain in self.internal.domains]


def privacy_notes(about: Record) -> tuple[str, ...]:
    """Returns a note for the user on what `describe_privacy` returned, if anything."""
    if not about:
        return ()
    keys = about["privacy"]
    note = f"privacy: updates of clients are clipped to norm {keys['clip']:g}"
    if keys["epsilon"] is None:
        return (f"{note}; without noise no epsilon follows from that",)
    return (
        f"{note}, noise of {keys['noise']:g} times that is added by the {keys['at']}: each client "
        f"has (epsilon, delta) = ({keys['epsilon']:.3g}, {keys['delta']:g}) after {keys['rounds']} "
        f"rounds ({keys['neighbours']}), for what is shared; not for losses, accuracies and "
        "personal leaves, see docs/privacy.md",
    )


def personalization_of(
    method: FederatedMethod, seed: int, samples: int | None = None
) -> Personalization | None:
    """Returns how clients adapt before they are tested; `samples` None is the method's number."""
    usual_rate = inspect.signature(personalize).parameters["inner_rate"].default
    method_samples, rate = method.personalize or (0, usual_rate)
    samples = method_samples if samples is None else samples
    return Personalization(samples, rate, seed) if samples else None


def check_labelled(
    choice: Personalization | None, internal: Dataset, unseen: Sequence[Domain]
) -> None:
    """Raises ConfigError if a client has too few samples to label some and test the others."""
    if not choice:
        return
    key = f"config.personalize_samples={choice.samples}"
    if any(isinstance(domain.test.labels, dict) for domain in (*internal.domains, *unseen)):
        raise ConfigError(f"{key} adapts classifiers, not detectors or masks: set it to 0")
    tested = [(domain.name, *part) for domain in internal.domains for part in splits(domain)]
    tested += [(domain.name, "whole", whole(domain)) for domain in unseen]
    for client, name, split in tested:
        labelled, unlabelled = _draw_labelled(split, choice)
        if name != "train" and (len(labelled) < choice.samples or not len(unlabelled)):
            raise ConfigError(f"{key} leaves no {name} samples of {client!r} to test: lower it")


def _draw_labelled(split: Split, choice: Personalization) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the labelled samples i64[n] and of those that are tested i64[m]."""
    # If some samples of one name, such as windows of a recording, are labelled, the others are not
    # tested. The same samples in every round and every command, whatever else the run draws.
    group = number_groups(split.names, len(split.images))
    labelled = np.random.default_rng(choice.seed).permutation(len(group))[: choice.samples]
    return labelled, np.flatnonzero(~np.isin(group, group[labelled]))


def set_aside(
    parts: Sequence[Split], choice: Personalization
) -> tuple[tuple[Split, ...], tuple[Split, ...]]:
    """Returns the labelled samples of each split, and the tested ones in the split's order."""
    # A split that several clients have (the same object) stays one object, which is stored once.
    divided = {
        id(split): tuple(select(split, index) for index in _draw_labelled(split, choice))
        for split in {id(split): split for split in parts}.values()
    }
    return tuple(zip(*(divided[id(split)] for split in parts), strict=True))
