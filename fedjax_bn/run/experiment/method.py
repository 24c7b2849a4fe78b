"""The method that a configuration names, and the adaptations that it serves."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_bn import methods, sharing
from fedjax_bn.adaptation.choice import NEEDS
from fedjax_bn.arguments.choices import call_chosen, naming
from fedjax_bn.arguments.text import brief
from fedjax_bn.client import Load, look_up
from fedjax_bn.data.pixels.images import Prepare, standardize
from fedjax_bn.engine.perturb import Perturb, amplitude_mix, randconv
from fedjax_bn.engine.selection import best_of_round, validation_score
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.models import SmallCNN
from fedjax_bn.run.config.defaults import keys
from fedjax_bn.run.config.keys import choice_of
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.optimizer import ends_with_run, local_optimizer
from fedjax_bn.run.experiment.privacy import choose_privacy
from fedjax_bn.run.experiment.task import option_of
from fedjax_bn.run.experiment.weighing import (
    choose_weighing,
    is_told,
    told_weighing,
)
from fedjax_bn.run.experiment.weighing import follows_rounds as weighing_follows_rounds
from fedjax_bn.sharing import Variables
from fedjax_bn.task import Task, classification

METHODS = {name: getattr(methods, name) for name in methods.__all__}
SHARING = {
    rule.__name__: rule
    for rule in (
        sharing.everything,
        sharing.nothing,
        sharing.all_but_batch_norm,
        sharing.all_but_statistics,
    )
}
PERTURBATIONS = {make.__name__: make for make in (amplitude_mix, randconv)}
# What the configuration gives every method by keys of its own.
GIVEN = ("clients", "keep_optimizer", "local_epochs")


def group_of(method: str) -> str:
    """The group of keys that are a method's arguments.

    A method without arguments of its own is a variant of the one that its file is named after, and
    has that one's.
    """
    if method not in METHODS or any(key.startswith(f"{method}.") for key in keys()):
        return method
    return METHODS[method].__module__.rpartition(".")[2]


def follows_rounds(config: ConfigDict) -> str:
    """The key whose plan follows from the number of rounds, such as a cosine's; "" for none."""
    if ends_with_run(config):
        return f"optimizer.schedule={config.optimizer.schedule} (without optimizer.decay_rounds)"
    return f"weigh={brief(config.weigh)}" if weighing_follows_rounds(config) else ""


def method_maker(
    config: ConfigDict,
) -> Callable[..., FederatedMethod]:
    """Returns `make(model, prepare, load, task, mesh=None)` for the configured method.

    A method's own arguments are the configuration's keys of its group, such as `fedprox.mu`, see
    `group_of`. A user's own method, `package.module:function:key=value`, is a function
    `(model, optimizer, *, prepare, load, clients, local_epochs, ...) -> FederatedMethod`; on
    several devices it is given `mesh` too.

    Raises:
      ConfigError: an unknown name, module or argument.
    """
    method, options = choose_method("method", config.method)
    options |= dict(config.get(group_of(config.method), {}))
    if config.share:
        options["share"] = _choose_sharing(config.share)
    if config.weigh:
        options["weigh"] = choose_weighing(config.weigh)
    if mechanism := choose_privacy(config):
        options["privacy"] = mechanism
    if config.data.perturb:
        options["perturb"] = choose_perturbation(config.data.perturb)
    optimizer = local_optimizer(config)
    options |= {"clients": config.clients, "local_epochs": max(local_epochs(config))}
    if config.optimizer.keep:
        options["keep_optimizer"] = True

    def make(
        model: nn.Module, prepare: Prepare, load: Load, task: Task, mesh: Mesh | None = None
    ) -> FederatedMethod:
        options_of_run = options | {"prepare": prepare, "load": load} | option_of(task)
        what = f"config.method={brief(config.method)}"
        if mesh is not None:
            _check_takes_mesh(what, method)
            options_of_run["mesh"] = mesh
        made = call_chosen(what, method, model, optimizer, **options_of_run)
        if not isinstance(made, FederatedMethod):
            raise ConfigError(f"{what} gives {type(made).__name__}, not a FederatedMethod")
        if config.local_selection:  # as its clients predict, which the method has said
            score = validation_score(model, prepare, task, made.statistics)
            options_of_run["train"] = best_of_round(score, config.local_selection)
        if is_told(config):
            options_of_run["weigh"] = told_weighing(config, model, prepare, task, made.statistics)
        if config.local_selection or is_told(config):
            made = call_chosen(what, method, model, optimizer, **options_of_run)
        return made

    return make


def _check_takes_mesh(what: str, method: Callable[..., FederatedMethod]) -> None:
    """Raises ConfigError where a user's own method knows nothing of several devices."""
    known = inspect.signature(method).parameters.values()
    if not any(p.name == "mesh" or p.kind is p.VAR_KEYWORD for p in known):
        raise ConfigError(
            f"{what} takes no argument mesh, which says over which devices its clients are shared "
            "out: give it one, for `federate`, or train on one device with config.mesh=1"
        )


def choose_method(key: str, text: str) -> tuple[Callable[..., FederatedMethod], dict[str, Any]]:
    """The method that a value of `key` names, and the arguments that it spells (a user's own only).

    Raises:
      ConfigError: an unknown name or module, or arguments of a method that has keys for them.
    """
    method, options = choice_of(key, text, METHODS, GIVEN)
    if options and method in METHODS.values():
        name = text.partition(":")[0]
        raise ConfigError(
            f"config.{key}={brief(text)}: arguments of {name} are keys of their own, "
            f"config.{group_of(name)}.KEY, see `fedjax-bn list keys`"
        )
    return method, options


def _choose_sharing(text: str) -> sharing.SharingRule:
    """The sharing rule of that name, or a user's own, `package.module:function`.

    Raises:
      ConfigError: an unknown name, module or key.
    """
    rule, options = choice_of("share", text, SHARING)

    def share(variables: Variables) -> Any:
        what = f"config.share={brief(text)}"
        with naming(what):
            mask = rule(variables, **options)
            if jax.tree.structure(mask) != jax.tree.structure(variables):
                raise ConfigError(f"{what} must give a boolean for each leaf, in the same tree")
        return mask

    return share if rule not in SHARING.values() else rule


def choose_perturbation(text: str) -> Perturb:
    """What `amplitude_mix:probability=0.5` spells, or a user's own function that returns one.

    Raises:
      ValueError: an unknown name or key, or a value of the wrong type or out of its range.
    """
    make, options = choice_of("data.perturb", text, PERTURBATIONS)
    perturb = call_chosen(f"config.data.perturb={brief(text)}", make, **options)
    if not callable(perturb):
        raise ConfigError(
            f"config.data.perturb={brief(text)} gives {type(perturb).__name__}, not a function "
            "(key, x, valid) -> x"
        )
    return perturb


def local_epochs(config: ConfigDict) -> tuple[int, ...]:
    """The local epochs of each client, or one number for all."""
    return tuple(map(int, config.client_epochs)) or (config.local_epochs,)


def check_adaptations(config: ConfigDict, adaptations: Iterable[str]) -> None:
    """Raises ConfigError if an adaptation needs what the configured method does not train."""
    served = set(served_of(config, adaptations))
    for text in adaptations:
        if text not in served:
            raise ConfigError(
                f"config.adaptations has {brief(text)}, but method={config.method!r} does not "
                f"train what it needs: {NEEDS[text.partition(':')[0]]}"
            )


def served_of(config: ConfigDict, adaptations: Iterable[str]) -> tuple[str, ...]:
    """Those of the adaptations for which the configured method trains all that they need."""
    names = {text: text.partition(":")[0] for text in adaptations}
    if NEEDS.keys().isdisjoint(names.values()):
        return tuple(names)
    # What a method serves depends on its arguments alone, not on the model or the data.
    method = method_maker(config)(SmallCNN(), standardize(), look_up, classification())
    return tuple(text for text, name in names.items() if name not in NEEDS or name in method.serves)
