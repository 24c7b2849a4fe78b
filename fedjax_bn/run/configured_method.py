"""The method that a configuration names, and what some methods train besides the model."""

import inspect
from collections.abc import Callable, Iterable

import flax.linen as nn
import jax
import optax
from ml_collections import ConfigDict

from fedjax_bn import aggregation, methods, sharing
from fedjax_bn.client import Load
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.normalization.adapter import with_adapter
from fedjax_bn.run.config import choose
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.selection import Find, best_of_round, validation_accuracy
from fedjax_bn.sharing import Variables
from fedjax_bn.spelling import spelled_change

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
WEIGHING = {
    "by_size": lambda: aggregation.by_size,
    "uniform": lambda: aggregation.uniform,
    "risk_extrapolation": aggregation.risk_extrapolation,
}
OPTIMIZERS = {
    "sgd": lambda config: optax.sgd(
        config.learning_rate, config.momentum or None, nesterov=config.nesterov
    ),
    "adam": lambda config: optax.adam(config.learning_rate),
}
# Methods whose arguments are another one's keys.
KEYS_OF = {"fediga": "fedig"}
# What a method adds to the common start: `add(key, model, variables, images) -> variables`.
ADDS = {"fediga": with_adapter}
# Adaptations that need something trained, and which of them a method's model can serve.
NEEDING = ("zero_shot_adapter", "learned_alpha")
SERVES = {
    "fediga": lambda config: ("zero_shot_adapter",),
    "fedig": lambda config: ("learned_alpha",) if config.fedig.gates else (),
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


def start_notes(config: ConfigDict) -> tuple[str, ...]:
    """Sentences on how the configured method depends on the weights that it starts from."""
    if _group_of(config.method) != "fedig" or not config.fedig.lambda_2:
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
) -> Callable[[nn.Module, Prepare, Load | None, Find | None], FederatedMethod]:
    """Returns `make(model, prepare, load, find)` for the configured method.

    A method's own arguments are the configuration's keys under its name, such as `fedprox.mu`;
    FedIG-A has those of FedIG.
    """
    method = choose(METHODS, config.method, "method")
    options = dict(resolved(config).get(_group_of(config.method), {}))
    if config.share:
        options["share"] = choose(SHARING, config.share, "share")
    if config.weigh:
        options["weigh"] = choose_weighing(config.weigh)
    make_optimizer = choose(OPTIMIZERS, config.optimizer.name, "optimizer.name")
    optimizer = make_optimizer(config.optimizer)
    if config.optimizer.weight_decay:
        optimizer = optax.chain(optax.add_decayed_weights(config.optimizer.weight_decay), optimizer)
    options |= {"clients": config.clients, "local_epochs": max(local_epochs(config))}
    if config.optimizer.keep:
        options["keep_optimizer"] = True

    def make(
        model: nn.Module, prepare: Prepare, load: Load | None, find: Find | None
    ) -> FederatedMethod:
        train = {}
        if config.local_selection:
            score = validation_accuracy(model, prepare, find)
            train["train"] = best_of_round(score, config.local_selection)
        return method(model, optimizer, prepare=prepare, load=load, **train, **options)

    return make


def choose_weighing(text: str) -> aggregation.WeighingRule:
    """The rule that `name:key=value:key=value` spells, such as `risk_extrapolation:eta=0.3`.

    Raises:
      ValueError: an unknown name or key, or a value of the wrong type or out of its range.
    """
    name, *changes = text.split(":")
    make = choose(WEIGHING, name, "weigh")
    parameters = inspect.signature(make).parameters.items()
    defaults = {key: parameter.default for key, parameter in parameters}
    if changes and not defaults:
        raise ConfigError(f"config.weigh={text!r}: {name} takes no arguments")
    return make(**dict(spelled_change(f"config.weigh={text!r}", c, defaults) for c in changes))


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
    add = ADDS.get(config.method)
    return add(key, model, variables, images) if add else variables


def suits(config: ConfigDict, text: str) -> bool:
    """Whether the configured method trains what an adaptation needs."""
    name = text.partition(":")[0]
    return name not in NEEDING or name in SERVES.get(config.method, lambda config: ())(config)


def check_adaptations(config: ConfigDict, adaptations: Iterable[str]) -> None:
    """Raises ConfigError if an adaptation needs what the configured method does not train."""
    for text in adaptations:
        if not suits(config, text):
            raise ConfigError(
                f"config.adaptations has {text!r}, for which method={config.method!r} trains "
                "nothing: zero_shot_adapter needs method=fediga, learned_alpha needs method=fedig "
                "with fedig.gates=True"
            )
