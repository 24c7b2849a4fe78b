"""The configuration: keys, types and ranges, from the command line and from config files."""

import inspect

import optax
import pytest

from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.arguments.choices import plain_arguments
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.models import MLP, DenseNet121, DigitCNN, ResNet18, TwoLayer
from fedjax_bn.run.config import base, check, flatten, override
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.method import METHODS, PERTURBATIONS, WEIGHING
from fedjax_bn.run.experiment.model import OF_CALLER

VALID = [
    # text, key, value
    ("rounds=3", "rounds", 3),
    ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
    ("data.fraction=None", "data.fraction", None),
    ("method='fedavg'", "method", "fedavg"),
    ("data.path=123", "data.path", "123"),
    ("data.path=a=b", "data.path", "a=b"),
    ("baselines=fedavg,fedprox:mu=0.1", "baselines", ("fedavg", "fedprox:mu=0.1")),
    ("adaptations=('running', 'batch')", "adaptations", ("running", "batch")),
    ("baselines=", "baselines", ()),
]
WRONG = [
    # text, what the message holds after the key
    ("rounds=1.5", "int"),
    ("optimizer.learning_rate=fast", "float"),
    ("adaptations=3", "a tuple of names"),
    ("rounds=0", "at least 1"),
    ("optimizer.learning_rate=nan", "finite"),
    ("on_nonfinite=ignore", "valid are drop, stop"),
    ("data.cache=None", "a folder that begins"),
    ("data.partition=drawn:9", "dirichlet:alpha=A:smallest=N, drawn"),
    ("batch_size=1" + "0" * 30, " must be "),
    ("client_epochs=1000000,1,1", " must be "),
    ("optimizer.learning_rate=1e-50", " must be "),
]


def write(tmp_path, body: str) -> str:
    """A config file with this body of get_config, as `config.read` takes it."""
    file = tmp_path / "mine.py"
    head = "from fedjax_bn.run.config import base, override\n\n\ndef get_config(changes=''):\n"
    file.write_text(
        f"{head}    config = base()\n    {body}\n    return override(config, changes)\n"
    )
    return str(file)


@pytest.mark.parametrize(("text", "key", "value"), VALID)
def test_a_value_means_the_same_after_the_file_and_as_a_flag(tmp_path, text, key, value):
    file = write(tmp_path, "")
    inline = dict(flatten(read(f"{file}:{text}")))
    assert inline == dict(flatten(read(file, [tuple(text.split("=", 1))])))
    assert inline[key] == value
    assert type(inline[key]) is type(value)


def test_several_changes_may_have_commas_within_a_value():
    config = override(base(), "adaptations=running,batch,rounds=3,data.path=a,b,seed=1,")
    assert config.adaptations == ("running", "batch")
    assert (config.rounds, config.data.path, config.seed) == (3, "a,b", 1)


@pytest.mark.parametrize(("text", "allowed"), WRONG)
def test_a_wrong_type_or_range_names_key_and_what_is_allowed(tmp_path, text, allowed):
    key, value = text.split("=", 1)
    file = write(tmp_path, "")
    for source, changes in ((f"{file}:{text}", []), (file, [(key, value)])):
        with pytest.raises(ConfigError) as error:
            read(source, changes)
        assert str(error.value).startswith(f"config.{key}=")
        assert allowed in str(error.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ("rouds=1", ["'rouds'", "'rounds'"]),
        ("learning_rate=1", ["'optimizer.learning_rate'"]),
        ("optimizer.learn_rate=1", ["'optimizer.learning_rate'"]),
        ("xyzzy=1", ["'xyzzy'; `fedjax-bn list keys`"]),
        ("data=1", ["'data.clients_per_domain'"]),
        ("fast,rounds=3", ["'fast'"]),
        ("privacy=server:noise=1", ["needs clip"]),
        ("privacy=server:clp=1", ["'clp=1'", "did you mean 'clip'?"]),
        ("privacy=client:clip=0", ["clip=0.0 must be above 0"]),
        ("privacy=sever:clip=1", ["did you mean 'server'?"]),
        ("participation=os:getcwd", ["valid are by_size, uniform"]),
    ],
)
def test_an_unknown_key_names_the_nearest_and_changes_that_do_not_go_together_are_refused(
    changes, parts
):
    with pytest.raises(ConfigError) as error:
        check(override(base(), changes))
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("config.rouds = 3", "no key 'rouds'; did you mean 'rounds'"),
        ("config.rounds = 0.5", "mine.py fails (TypeError: Could not override field 'rounds'"),
        ("x = (", "mine.py, line 6"),
        ("undefined", "mine.py fails (NameError: name 'undefined' is not defined)"),
        ("return 3", "that returns a ConfigDict"),
        ("del config['rounds']", "lacks rounds"),
    ],
)
def test_a_mistake_in_a_config_file_is_named_in_one_line(tmp_path, body, message):
    if body.startswith("del"):
        body = f"config.unlock(); {body}"
    with pytest.raises(ConfigError) as error:
        read(write(tmp_path, body), [("data.name", "tiny")])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


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
