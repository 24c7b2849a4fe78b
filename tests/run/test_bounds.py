"""Values out of their range are refused, alike in Python and in a configuration."""

import inspect

import optax
import pytest

from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.arguments.choices import plain_arguments
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.models import MLP, DenseNet121, DigitCNN, ResNet18, TwoLayer
from fedjax_bn.run.config import base, check, override
from fedjax_bn.run.experiment.method import METHODS, OF_CALLER, PERTURBATIONS, WEIGHING

CANNOT_RUN = [
    "batch_size=1" + "0" * 30,
    "rounds=2147483648",
    "local_epochs=10000000",
    "client_epochs=1000000,1,1",
    "optimizer.momentum=1",
    "seed=4294967296",
    "data.partition=dirichlet:smallest=0",
    "data.partition=nonsense",
    "optimizer.learning_rate=1e-50",
]


@pytest.mark.parametrize("text", CANNOT_RUN, ids=lambda text: text[:40])
def test_a_value_that_cannot_run_is_refused_with_what_is_allowed(text):
    key = text.partition("=")[0]
    with pytest.raises(ConfigError, match=f"config.{key}=.* must be "):
        check(override(base(), text))


FACTORIES = [*METHODS.values(), *ADAPTATIONS.values(), *WEIGHING.values()]
FACTORIES += [*PERTURBATIONS.values(), MLP, DenseNet121, DigitCNN, ResNet18, TwoLayer]
STATED = [
    (factory, key, argument.range)
    for factory in FACTORIES
    for key, argument in plain_arguments(factory, OF_CALLER).items()
    if argument.kind in (int, float) and key != "local_epochs"  # a key of the run
]


@pytest.mark.parametrize(
    ("factory", "key", "allowed"), STATED, ids=lambda x: getattr(x, "__name__", str(x)[:20])
)
def test_python_and_the_configuration_know_the_same_range(factory, key, allowed):
    values = (-1.0, 2.0, -1, 0, 10**30, float("inf"))
    kind = plain_arguments(factory, OF_CALLER)[key].kind
    wrong = [value for value in values if type(value) is kind and not allowed.holds(value)]
    assert wrong, "a range that refuses nothing"
    parts, signature = {"model": MLP(), "optimizer": optax.sgd(0.1)}, inspect.signature(factory)
    needed = {name: parts[name] for name in parts if name in signature.parameters}
    for value in wrong:
        with pytest.raises(ValueError, match=f"{key}=.* must be "):
            factory(**needed, **{key: value})
