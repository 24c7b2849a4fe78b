"""Builds the method of a configuration, with its rules and its local optimizer."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from fedjax_bn import aggregation, contrib, methods, models, sharing
from fedjax_bn.adaptation.choice import NEEDS
from fedjax_bn.arguments.choices import (
    REQUIRED,
    Argument,
    Table,
    call_chosen,
    naming,
    plain_arguments,
)
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.ranges import BY_KIND, Fraction, Rounds, RoundsOr0, Share
from fedjax_bn.arguments.text import brief, names_in
from fedjax_bn.client import Load, look_up
from fedjax_bn.contrib.fedawa import adaptive_weights
from fedjax_bn.contrib.fedlws import layer_shrinking
from fedjax_bn.engine.images import Prepare, standardize
from fedjax_bn.engine.perturb import amplitude_mix, randconv
from fedjax_bn.engine.privacy import gaussian
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import by_round
from fedjax_bn.methods.selection import Score, best_of_round, validation_loss, validation_score
from fedjax_bn.models.classifier import all_but_head, only_head
from fedjax_bn.run.config.choices import choice_of, optimizer_of, privacy_of
from fedjax_bn.sharing import SharingRule, Variables
from fedjax_bn.task import Task, classification

METHODS = {name: getattr(module, name) for module in (methods, contrib) for name in module.__all__}
_OF_THE_MODEL = (all_but_head, only_head)  # functions of the model that return a rule
_SHARING: dict[str, Callable[..., Any]] = {
    rule.__name__: rule
    for rule in (
        *(sharing.everything, sharing.nothing, sharing.all_but_batch_norm),
        *(sharing.all_but_statistics, sharing.all_but_norms, *_OF_THE_MODEL),
    )
}
_FROZEN = {"at": sharing.at, "all_but": sharing.all_but}
_PATHS = Argument(str, REQUIRED, BY_KIND[str])
WEIGHING = {
    rule.__name__: rule
    for rule in (
        *(aggregation.by_size, aggregation.uniform, aggregation.risk_extrapolation),
        *(aggregation.generalization_adjustment, aggregation.by_divergence),
        *(aggregation.coordinate_median, aggregation.trimmed_mean, aggregation.krum),
        *(aggregation.geometric_median, aggregation.norm_clipping),
        *(adaptive_weights, layer_shrinking),
    )
}
PERTURBATIONS = {make.__name__: make for make in (amplitude_mix, randconv)}
OPTIMIZERS: dict[str, Callable[[ConfigDict, Any], optax.GradientTransformation]] = {
    "sgd": lambda keys, rate: optax.sgd(rate, keys.momentum or None, nesterov=keys.nesterov),
    "adam": lambda keys, rate: optax.adam(rate),
}
# (the full rate, the rounds of the run after the warm-up) -> the rate by round
_Schedule = Callable[[float, int], optax.Schedule]


def _cosine(rounds: RoundsOr0 = 0, final: Share = 0.0) -> _Schedule:
    return lambda rate, remaining: optax.cosine_decay_schedule(rate, rounds or remaining, final)


def _step(rounds: Rounds, factor: Fraction = 0.1) -> _Schedule:
    return lambda rate, remaining: optax.exponential_decay(rate, rounds, factor, staircase=True)


def _exponential(rounds: Rounds, factor: Fraction = 0.1) -> _Schedule:
    return lambda rate, remaining: optax.exponential_decay(rate, rounds, factor)


_SCHEDULES: dict[str, Callable[..., _Schedule]] = {
    "constant": lambda: lambda rate, remaining: optax.constant_schedule(rate),
    "cosine": _cosine,
    "step": _step,
    "exponential": _exponential,
}
# Arguments that keys set for all methods, a fact, and one that makes another method of it.
_ELSEWHERE = ("clients", "combines", "keep_optimizer", "local_epochs", "adapter")


def method_options(name: str) -> dict[str, Argument]:
    """Returns the options of a method of the library: those that `name:key=value` can set."""
    # A method without options of its own is a variant of the method that its file is named after,
    # such as `fediga` of `fedig`, and has that method's.
    family = METHODS.get(METHODS[name].__module__.rpartition(".")[2], METHODS[name])
    options = plain_arguments(METHODS[name], _ELSEWHERE) or plain_arguments(family, _ELSEWHERE)
    return {key: option for key, option in options.items() if option.default is not None}


def method_maker(config: ConfigDict) -> Callable[..., FederatedMethod]:
    """Returns `make(model, prepare, load, task, **options)` for the configured method.

    A user's own method, `package.module:function:key=value`, is a function
    `(model, optimizer, *, prepare, load, clients, local_epochs, ...) -> FederatedMethod`. An
    unknown name, module or argument is a ConfigError.
    """
    method, options = choose_method("method", config.method)
    culprit = f"config.method={brief(config.method)}"
    # Omitted arguments keep the method's own default, which may differ from FedAvg's.
    if config.share:
        options["share"] = _choose_sharing("share", config.share)
    if config.frozen:
        options["frozen"] = _choose_frozen(config.frozen)
    if config.weigh:
        options["weigh"] = _choose_weighing(config.weigh)
    if privacy := privacy_of(config):
        seed = config.seed if privacy.seed is None else privacy.seed
        options["privacy"] = gaussian(privacy.clip, privacy.noise, at=privacy.at, seed=seed)
    if config.data.perturb:
        options["perturb"] = _made("data.perturb", config.data.perturb, PERTURBATIONS)
    if config.optimizer.keep:
        options["keep_optimizer"] = True
    optimizer = local_optimizer(config)
    # The method gets the most epochs of a client; the sampler leaves the last ones of others empty.
    options |= {"clients": config.clients, "local_epochs": max(local_epochs(config))}

    def make(model: Any, prepare: Prepare, load: Load, task: Task, **more: Any) -> FederatedMethod:
        arguments = options | {"prepare": prepare, "load": load} | more
        if task != classification():  # the default of every method
            arguments["task"] = task
        for key in ("share", "frozen"):
            if arguments.get(key) in _OF_THE_MODEL:
                arguments[key] = arguments[key](model)

        def validating(measure: Callable[..., Score]) -> Score:
            # Clients validate as they predict, by the statistics of the method, which is made
            # below, before a round is traced.
            return lambda *state: measure(model, prepare, task, built.statistics)(*state)

        if config.local_selection:
            score = validating(validation_score)
            arguments["train"] = best_of_round(score, config.local_selection)
        if weighs_by_validation(config):
            rule, of_rule = choice_of("weigh", config.weigh, WEIGHING)
            by_accuracy = of_rule.get("metric") == "accuracy"
            measure = validating(validation_score if by_accuracy else validation_loss)
            arguments["weigh"] = rule(measure, **{"rounds": config.rounds} | of_rule)
        built = call_chosen(culprit, method, model, optimizer, **arguments)
        if not isinstance(built, FederatedMethod):
            raise ConfigError(f"{culprit} gives {type(built).__name__}, not a FederatedMethod")
        return built

    return make


def _made(key: str, text: str, table: Table) -> Any:
    """Returns what the function that a key chooses makes of its options."""
    make, options = choice_of(key, text, table)
    return call_chosen(f"config.{key}={brief(text)}", make, **options)


def choose_method(key: str, text: str) -> tuple[Callable[..., FederatedMethod], dict[str, Any]]:
    """Returns the method that a text such as `fedprox:mu=0.1` names, and its options."""
    name = name_of(text)
    options = method_options(name) if name in METHODS else {}
    return choice_of(key, text, METHODS, *_ELSEWHERE, **options)


def option_values(method: str) -> dict[str, Any]:
    """Returns the values of all options of a method of the library, with its defaults."""
    name = name_of(method)
    if name not in METHODS:
        return {}
    defaults = {key: option.default for key, option in method_options(name).items()}
    return defaults | choose_method("method", method)[1]


def name_of(method: str) -> str:
    """Returns the name in a text such as `fedprox:mu=0.1`; of a user's own method the text."""
    name = method.partition(":")[0]
    return name if name in METHODS else method


def _choose_frozen(text: str) -> SharingRule:
    """Returns the rule of frozen leaves that a text names: paths, or as in `_choose_sharing`."""
    if text.partition(":")[0] in _FROZEN:
        rule, options = choice_of("frozen", text, _FROZEN, paths=_PATHS)
        return rule(*names_in(options.pop("paths")), **options)
    if ":" in text or text in _SHARING:
        return _choose_sharing("frozen", text)
    return sharing.at(*names_in(text))


def _choose_sharing(key: str, text: str) -> SharingRule:
    """Returns the sharing rule of that name, or a user's own, `package.module:function`."""
    rule, options = choice_of(key, text, _SHARING)
    if rule in _SHARING.values():
        return rule
    culprit = f"config.{key}={brief(text)}"

    def share(variables: Variables) -> Any:
        with naming(culprit):
            mask = rule(variables, **options)
            if jax.tree.structure(mask) != jax.tree.structure(variables):
                raise ConfigError(f"{culprit} must give a boolean for each leaf, in the same tree")
        return mask

    return share


def _choose_weighing(text: str) -> aggregation.WeighingRule:
    """Returns the rule that a text such as `risk_extrapolation:eta=0.3` chooses."""
    # A user's own is a function `(sizes, risks, *, ...) -> weights`, or one without required
    # arguments that returns such a function.
    function, options = choice_of("weigh", text, WEIGHING)
    culprit = f"config.weigh={brief(text)}"
    if any(p.default is p.empty for p in inspect.signature(function).parameters.values()):
        rule = partial(function, **options) if options else function
    else:
        rule = call_chosen(culprit, function, **options)
    if not isinstance(rule, aggregation.Weighing):
        # No arrays, with which JAX would start; `lax.add` takes one weight for each client alone.
        kinds = jnp.int32, jnp.result_type(float)
        sizes, risks = (jax.ShapeDtypeStruct((2,), kind) for kind in kinds)
        with naming(culprit):
            jax.eval_shape(lambda n, r: jax.lax.add(rule(n, r), r), sizes, risks)
    return rule


def weighs_by_validation(config: ConfigDict) -> bool:
    """Returns whether clients measure models on their validation samples for the weighing rule."""
    return config.weigh.partition(":")[0] == aggregation.generalization_adjustment.__name__


def what_validates(config: ConfigDict) -> str:
    """Returns the key that needs validation samples during training; "" for none."""
    if config.local_selection:
        return f"config.local_selection={config.local_selection}"
    return f"config.weigh={brief(config.weigh)}" if weighs_by_validation(config) else ""


def own_rules(method: str, private: bool = False) -> dict[str, str]:
    """Returns {"share": name, "weigh": name} of the rules that a method of the library has."""
    if name_of(method) not in METHODS:
        return {}
    rules = {"share": sharing.everything.__name__, "weigh": aggregation.by_size.__name__}
    parameters = inspect.signature(METHODS[name_of(method)]).parameters
    for key in rules.keys() & parameters:
        # Without a default the annotation names the function that makes the rule:
        # `Annotated[WeighingRule | None, risk_extrapolation]`.
        rule = parameters[key].default or parameters[key].annotation.__metadata__[0]
        rules[key] = rule.__name__
    return rules | {"weigh": "uniform"} if private else rules  # clipped updates count equally


def has_own_weighing(method: str) -> bool:
    """Returns whether the default weighing of a method of the library differs from FedAvg's."""
    return own_rules(method).get("weigh", "by_size") != "by_size"


def local_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Returns the clients' optimizer; a schedule or a warm-up changes its rate by round."""
    keys = config.optimizer
    name, clip = optimizer_of(config)
    make, warmup = OPTIMIZERS[name], keys.warmup_rounds
    # A constant rate stays a number: the program of a round then does not compute it.
    if keys.schedule == "constant" and not warmup:
        optimizer = make(keys, keys.learning_rate)
    else:
        full, remaining = keys.learning_rate, max(config.rounds - warmup, 1)
        rate = _made("optimizer.schedule", keys.schedule, _SCHEDULES)(full, remaining)
        if warmup:
            # During W warm-up rounds the rate is (round + 1) / (W + 1) of the full rate, with which
            # the schedule begins in the round after them.
            rise = optax.linear_schedule(full / (warmup + 1), full, warmup)
            rate = optax.join_schedules([rise, rate], [warmup])
        optimizer = by_round(lambda round: make(keys, rate(round)))
    if keys.weight_decay:
        optimizer = optax.chain(optax.add_decayed_weights(keys.weight_decay), optimizer)
    # First, as PyTorch's users clip: the weight decay is not clipped.
    return optax.chain(optax.clip_by_global_norm(clip), optimizer) if clip else optimizer


def local_epochs(config: ConfigDict) -> tuple[int, ...]:
    """Returns the local epochs of each client, or one number for all."""
    return tuple(map(int, config.client_epochs)) or (config.local_epochs,)


def follows_rounds(config: ConfigDict) -> str:
    """Returns the key whose schedule depends on the number of rounds, such as a cosine; or ""."""
    schedule, options = choice_of("optimizer.schedule", config.optimizer.schedule, _SCHEDULES)
    if schedule is _cosine and not options.get("rounds"):
        return f"optimizer.schedule={config.optimizer.schedule} (without cosine:rounds=N)"
    plans = weighs_by_validation(config)
    if plans and "rounds" not in choice_of("weigh", config.weigh, WEIGHING)[1]:
        return f"weigh={brief(config.weigh)}"
    return ""


def check_adaptations(config: ConfigDict, adaptations: Iterable[str]) -> None:
    """Raises ConfigError if an adaptation needs what the configured method does not train."""
    adaptations = tuple(adaptations)
    if missing := sorted({*adaptations} - {*served_of(config, adaptations)}):
        need = NEEDS[missing[0].partition(":")[0]]
        raise ConfigError(f"config.adaptations has {brief(missing[0])}: {need}")


def served_of(config: ConfigDict, adaptations: Iterable[str]) -> tuple[str, ...]:
    """Returns the adaptations for which the configured method trains all that they need."""
    names = {adaptation: adaptation.partition(":")[0] for adaptation in adaptations}
    if NEEDS.keys().isdisjoint(names.values()):
        return tuple(names)
    # What a method serves depends on its arguments alone, not on the model or the data.
    method = method_maker(config)(models.SmallCNN(), standardize(), look_up, classification())
    usable = method.serves
    return tuple(text for text, name in names.items() if name not in NEEDS or name in usable)
