"""The method that a configuration names, and what some methods train besides the model."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_bn import methods, sharing
from fedjax_bn.client import Load
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.engine.perturb import Perturb, amplitude_mix, randconv
from fedjax_bn.engine.ranges import brief
from fedjax_bn.engine.selection import best_of_round, validation_score
from fedjax_bn.engine.spelling import call_chosen, naming
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.normalization.adapter import with_adapter
from fedjax_bn.run.config.keys import choice_of
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.optimizer import ends_with_run, local_optimizer
from fedjax_bn.run.experiment.privacy import choose_privacy
from fedjax_bn.run.experiment.task import option_of
from fedjax_bn.run.experiment.weighing import (
    check_extrapolation,
    choose_weighing,
    is_told,
    told_weighing,
)
from fedjax_bn.run.experiment.weighing import follows_rounds as weighing_follows_rounds
from fedjax_bn.sharing import Variables
from fedjax_bn.task import Task

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
PERTURBATIONS = {"amplitude_mix": amplitude_mix, "randconv": randconv}
# What the configuration gives every method by keys of its own.
GIVEN = ("clients", "keep_optimizer", "local_epochs")
# Methods whose arguments are another one's keys.
KEYS_OF = {"fediga": "fedig"}
# What a method adds to the common start: `add(key, model, variables, images) -> variables`.
_ADDS = {"fediga": with_adapter}
# Adaptations that need something trained, and which of them a method's model can serve.
_NEEDING = ("zero_shot_adapter", "learned_alpha")
_SERVES = {
    "fediga": lambda config: ("zero_shot_adapter",),
    "fedig": lambda config: ("learned_alpha",) if config.fedig.gates else (),
    "copa": lambda config: ("learned_alpha",) if config.copa.gates else (),
}


def _group_of(method: str) -> str:
    return KEYS_OF.get(method, method)


def resolved(config: ConfigDict) -> ConfigDict:
    """The configuration with `fedig.cafl` chosen where it is empty.

    It is the paper's sum with `pretrained` weights, and the mean over features without.
    """
    if config.fedig.cafl:
        return config
    chosen = config.copy_and_resolve_references()
    chosen.fedig.cafl = "sum" if config.pretrained else "mean"
    return chosen


def shown_notes(config: ConfigDict) -> tuple[str, ...]:
    """Sentences on what of their data clients show by the configured method, besides its model."""
    if config.method != "feddg":
        return ()
    side = 2 * config.feddg.half + 1
    return (
        f"feddg sends the amplitudes of {side}x{side} frequencies of {config.feddg.spectra} images "
        "of each client to the server and to all other clients (feddg.spectra, feddg.half)",
    )


def follows_rounds(config: ConfigDict) -> str:
    """The key whose plan follows from the number of rounds, such as a cosine's; "" for none."""
    if ends_with_run(config):
        return f"optimizer.schedule={config.optimizer.schedule} (without optimizer.decay_rounds)"
    return f"weigh={brief(config.weigh)}" if weighing_follows_rounds(config) else ""


def start_notes(config: ConfigDict) -> tuple[str, ...]:
    """Sentences on how the configured method depends on the weights that it starts from."""
    if _group_of(config.method) != "fedig" or not config.fedig.lambda_2 or config.start_from:
        return ()
    cafl, weight = resolved(config).fedig.cafl, f"fedig.lambda_2={config.fedig.lambda_2:g}"
    if config.pretrained:
        start = f"{config.method} starts from {config.pretrained}"
        why = (
            "as the paper prints it (fedig.cafl=mean where that diverges)"
            if cafl == "sum"
            else "where the paper prints their sum"
        )
    else:
        start = f"{config.method} trains from scratch, because pretrained is empty"
        why = (
            "because the paper's sum, made for ImageNet's weights, diverges or loses the features "
            "from random ones; pretrained= gives the paper's"
            if cafl == "mean"
            else "which is made for ImageNet's weights and may diverge or lose the features here; "
            "fedig.cafl=mean does not"
        )
    return (f"{start}, with CAFL as the {cafl} over features ({weight} of it), {why}",)


def method_maker(
    config: ConfigDict,
) -> Callable[..., FederatedMethod]:
    """Returns `make(model, prepare, load, task, mesh=None)` for the configured method.

    A method's own arguments are the configuration's keys under its name, such as `fedprox.mu`;
    FedIG-A has those of FedIG. A user's own method, `package.module:function:key=value`, is a
    function `(model, optimizer, *, prepare, load, clients, local_epochs, ...) -> FederatedMethod`;
    on several devices it is given `mesh` too.

    Raises:
      ConfigError: an unknown name, module or argument.
    """
    method, options = choose_method("method", config.method)
    options |= dict(resolved(config).get(_group_of(config.method), {}))
    if config.share:
        options["share"] = _choose_sharing(config.share)
    check_extrapolation(config)
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
            f"config.{KEYS_OF.get(name, name)}.KEY, see `fedjax-bn list keys`"
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


def with_method_parts(
    config: ConfigDict, model: nn.Module, variables: Variables, images: jax.Array, key: jax.Array
) -> Variables:
    """The common start with what the configured method trains besides: FedIG-A its adapter.

    Args:
      config: the run's.
      model: linen module.
      variables: its collections.
      images: f[B, ...] as the model reads them; only the shape counts.
      key: random key.

    Raises:
      ValueError: the model has no batch norm to adapt.
    """
    add = _ADDS.get(config.method)
    return add(key, model, variables, images) if add else variables


def suits(config: ConfigDict, text: str) -> bool:
    """Whether the configured method trains what an adaptation needs."""
    name = text.partition(":")[0]
    return name not in _NEEDING or name in _SERVES.get(config.method, lambda config: ())(config)


def check_adaptations(config: ConfigDict, adaptations: Iterable[str]) -> None:
    """Raises ConfigError if an adaptation needs what the configured method does not train."""
    for text in adaptations:
        if not suits(config, text):
            raise ConfigError(
                f"config.adaptations has {brief(text)}, for which method={config.method!r} trains "
                "nothing: zero_shot_adapter needs method=fediga, learned_alpha needs method=fedig "
                "with fedig.gates=True, or method=copa"
            )
