"""Defines `Experiment`, all that a run needs, and reads a configuration's values into it."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_bn.adaptation.choice import Choice
from fedjax_bn.arguments.errors import as_config_errors
from fedjax_bn.data.domain import Dataset, Domain
from fedjax_bn.data.sampling import Sampler, by_epochs, by_steps
from fedjax_bn.engine.images import Prepare
from fedjax_bn.engine.privacy import epsilon
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods.perfedavg import personalize
from fedjax_bn.run.config.keys import flatten
from fedjax_bn.run.experiment.method import follows_rounds, local_epochs, what_validates
from fedjax_bn.run.files.workdir import Record
from fedjax_bn.task import Task, classification
from fedjax_bn.training.availability import Participation, kept_on_disk
from fedjax_bn.training.evaluation.personalization import Personalization


class LocalWork(NamedTuple):
    """A client's training in a round: `steps` steps if above 0, else `epochs`.

    `epochs` has one number for all clients, or one for each.
    """

    batch_size: int
    steps: int
    epochs: tuple[int, ...]

    def sampler(self, smallest: int, longest: int) -> Sampler:
        """Returns the function that draws the samples of a round.

        Args:
          smallest, longest: numbers of training samples of the smallest and the largest client.
        """
        if self.steps:
            return by_steps(self.batch_size, self.steps, smallest)
        return by_epochs(min(self.batch_size, longest), self.epochs)


class Plan(NamedTuple):
    """What the loop over rounds does and writes; other fields mean what their keys mean.

    Attributes:
      keys: dotted key -> value of the whole configuration, as config.json has it.
      follows: the key whose schedule depends on the number of rounds, see `method.follows_rounds`.
      privacy: `privacy(rounds)` returns the record of `describe_privacy` after that many rounds.
    """

    method: str
    model: str
    seed: int
    rounds: int
    patience: int
    eval_every: int
    checkpoint_every: int
    on_nonfinite: str
    clients_named: int
    predictions: str
    profile: int
    wandb: str
    device_megabytes: int
    start_from: str
    pretrained: str
    keys: Record
    follows: str
    privacy: Callable[[int], Record]


class Evaluation(NamedTuple):
    """How clients are tested; other fields mean what their keys mean.

    Attributes:
      clients: how many are evaluated, drawn from `seed`; 0 for all.
      device_megabytes: test data up to this size stay on the device.
      personalization: how a client adapts first; None if clients do not adapt.
    """

    batch_size: int
    device_megabytes: int
    clients: int
    seed: int
    eval_unseen: str
    eval_train_loss: bool
    validate_with: str
    personalization: Personalization | None


class Experiment(NamedTuple):
    """Everything that a run reads from the configuration, built and checked.

    Attributes:
      model: a linen module, or what `models.from_nnx` makes; wrapped by `models.precision.in_dtype`
        if it computes in another dtype.
      method: the federated method, whose batches hold images or numbers of samples in a source.
      internal: the clients, as the domains of a dataset.
      unseen: the domains that do not train.
      prepare: stored images -> what the model reads.
      adaptations: text -> how unseen clients predict.
      notes: messages for the user about the data and the start.
      participation: who takes part in a round.
      work: what a client does in a round.
      plan: the rounds, and what is written.
      evaluation: how clients are tested.
      mesh: the devices over which the method's clients are shared out; None for one.
      task: what is learned and reported.
      validates: the key that needs validation samples during training; "" for none.
    """

    model: Any
    method: FederatedMethod
    internal: Dataset
    unseen: tuple[Domain, ...]
    prepare: Prepare
    adaptations: dict[str, Choice]
    notes: tuple[str, ...]
    participation: Participation
    work: LocalWork
    plan: Plan
    evaluation: Evaluation
    mesh: Mesh | None = None
    task: Task = classification()
    validates: str = ""

    def sampler(self) -> Sampler:
        """Returns the function that draws the samples of a round."""
        sizes = [len(domain.train.images) for domain in self.internal.domains]
        return self.work.sampler(min(sizes), max(sizes))


def choose_participation(config: ConfigDict, num_clients: int) -> Participation:
    """Returns who takes part by `clients_per_round`, `participation` and `population`.

    It does not read the trace; `read_trace` does.
    """
    keys, drawn = config.participation, config.clients_per_round
    disk = kept_on_disk(config.population, drawn, num_clients)
    return Participation(drawn, keys.draw, keys.dropout, None, disk)


def read_values(config: ConfigDict, method: FederatedMethod, num_clients: int) -> dict[str, Any]:
    """Returns the fields of `Experiment` that come straight from the configuration, by name."""
    flat = dict(flatten(config))
    plan = Plan(
        **{name: flat[name] for name in Plan._fields if name in flat},
        device_megabytes=config.data.device_megabytes,
        keys=flat,
        follows=follows_rounds(config),
        privacy=partial(describe_privacy, config, num_clients),
    )
    return {
        "participation": choose_participation(config, num_clients),
        "work": LocalWork(config.batch_size, config.local_steps, local_epochs(config)),
        "plan": plan,
        "evaluation": read_evaluation(config, method),
        "validates": what_validates(config),
    }


def read_evaluation(config: ConfigDict, method: FederatedMethod) -> Evaluation:
    """Returns how clients are tested; empty `personalize.*` keys take the method's own values."""
    keys = config.personalize
    usual = inspect.signature(personalize).parameters["inner_rate"].default
    samples, rate = method.personalize or (0, usual)
    samples = samples if keys.samples is None else keys.samples
    rate = rate if keys.rate is None else keys.rate
    adapts = Personalization(samples, keys.steps, rate, config.seed) if samples else None
    return Evaluation(
        batch_size=config.eval_batch_size,
        device_megabytes=config.data.device_megabytes,
        clients=config.eval_clients,
        seed=config.seed,
        eval_unseen=config.eval_unseen,
        eval_train_loss=config.eval_train_loss,
        validate_with=config.validate_with,
        personalization=adapts,
    )


def describe_privacy(config: ConfigDict, clients: int, rounds: int) -> Record:
    """Returns {"privacy": ...} for config.json and summary.json; {} if nothing is clipped.

    Without noise epsilon is unbounded, and its entry is null.

    Raises:
      ConfigError: there is noise, but dp-accounting is not installed.
    """
    keys = config.privacy
    if not keys.clip:
        return {}
    # Sampling hides a client only if the cohort is drawn at random and the server does not know it.
    drawn, how = config.clients_per_round, config.participation
    hides = how.draw == "uniform" and not how.trace and not how.dropout and keys.at == "server"
    cohort = (drawn, clients) if 0 < drawn < clients and hides else ()
    with as_config_errors():
        spent = epsilon(keys.noise, rounds, keys.delta, cohort) if keys.noise else None
    return {
        "privacy": {
            "clip": keys.clip,
            "noise": keys.noise,
            "at": keys.at,
            "epsilon": spent,
            "delta": keys.delta,
            "rounds": rounds,
            "neighbours": "a client's data replaced" if cohort else "with or without a client",
        }
    }


def privacy_notes(about: Record) -> tuple[str, ...]:
    """Returns a note for the user on what `describe_privacy` returned."""
    if not about:
        return ()
    keys = about["privacy"]
    begin = f"privacy: updates of clients are clipped to norm {keys['clip']:g}"
    if keys["epsilon"] is None:
        return (f"{begin}; without privacy.noise no epsilon follows from that",)
    return (
        f"{begin}, noise of {keys['noise']:g} times that is added by the {keys['at']}: each client "
        f"has (epsilon, delta) = ({keys['epsilon']:.3g}, {keys['delta']:g}) after {keys['rounds']} "
        f"rounds ({keys['neighbours']}), for what is shared; not for losses, accuracies and "
        "personal leaves, see docs/privacy.md",
    )
