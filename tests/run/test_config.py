"""The configuration: keys, types and ranges, with one meaning in files, flags and Python."""

import ast
import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import method_table
from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.arguments.choices import plain_arguments
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.models import MLP, DenseNet121, DigitCNN, ResNet18, SmallCNN, TwoLayer
from fedjax_bn.run.config import base, check, flatten, override
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment import build
from fedjax_bn.run.experiment.method import METHODS, PERTURBATIONS, WEIGHING, local_optimizer
from fedjax_bn.run.experiment.model import OF_CALLER, choose_loading
from fedjax_bn.training.start import initial_variables, make_keys, make_start

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


RUN = Path(build.__file__).parents[1]
# What a user has to say in either way: how much feddg shows, and that fedwon has no batch norm.
SAID = {"feddg": {"spectra": 2}}
OFTEN = ("fedbn",)  # the others take longer
NETS = {"fedwon": "SmallCNN:norm=none"}


def images_of(size: int) -> Split:
    rng = np.random.default_rng(size)
    images = rng.integers(256, size=(size, 9, 9, 3), dtype=np.uint8)
    return Split(images, np.arange(size, dtype=np.int32) % 3)


@functools.cache
def data() -> Dataset:
    domains = [Domain(n, images_of(6), images_of(3), images_of(3)) for n in ("ant", "bee")]
    return Dataset("tiny", 3, tuple(domains), mean=(0.5,) * 3, std=(0.5,) * 3)


def built_both_ways(name, monkeypatch):
    """The method and its first state of the command line, and the two of Python."""
    monkeypatch.setitem(build.DATASETS, "tiny", lambda config: data())
    config = base()
    changes = {"method": name, "data.name": "tiny", "data.path": "none", "data.image_size": 9}
    changes |= {"batch_size": 3, "mesh.clients": 1, "personalize_samples": 0}
    changes |= {"model": NETS.get(name, "SmallCNN"), "adaptations": ("running",)}
    changes["method"] += "".join(f":{key}={value}" for key, value in SAID.get(name, {}).items())
    config.update_from_flattened_dict(changes)
    experiment, keys = build.build(config), make_keys(config.seed)
    load = choose_loading("none", 9, experiment.internal)
    given = {"prepare": experiment.prepare, "load": load} | SAID.get(name, {})
    method = method_table.METHODS[name](experiment.model, local_optimizer(config), **given)

    def start():
        variables = initial_variables(experiment, keys.model)
        return method.init(keys.method, variables, len(data().domains))

    return (experiment.method, make_start(experiment, keys)), (method, start)


def batches():
    domains = data().domains
    index = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    return {
        "image": jnp.stack([index] * 2),
        "label": jnp.stack([jnp.asarray(d.train.labels)[index] for d in domains]),
        "valid": jnp.ones((2, 2, 3), bool),
        "source": jnp.stack([jnp.asarray(d.train.images) for d in domains]),
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in method_table.METHODS],
)
def test_the_command_line_and_python_build_the_same_method(name, monkeypatch):
    """Compares programs: the same program gives the same bits, and is not compiled here."""
    (theirs, their_start), (ours, our_start) = built_both_ways(name, monkeypatch)
    programs = []
    for method, start in ((theirs, their_start), (ours, our_start)):
        begin = jax.jit(lambda start=start: start())
        state = jax.eval_shape(begin)
        text = method.round.lower(state, batches(), jax.random.key(0)).as_text()
        programs.append((jax.tree.structure(state), begin.lower().as_text(), text))
        assert {str(x.dtype) for x in jax.tree.leaves(state)} <= {"float32", "int32", "bool"}
    assert programs[0] == programs[1]
    fields = ("statistics", "serves", "notes", "personalize")
    assert [getattr(theirs, f) for f in fields] == [getattr(ours, f) for f in fields]


def test_no_file_of_run_names_a_method():
    """Texts and attributes; docstrings may."""
    names, found = {*method_table.METHODS}, []
    for file in sorted({*RUN.rglob("*.py")} - {RUN / "config" / "defaults.py"}):
        tree = ast.parse(file.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = getattr(node, "attr", "") or getattr(node, "value", "")
            if id(node) not in prose and isinstance(text, str):
                found += [(file.name, name) for name in names & {*re.findall(r"\w+", text)}]
    assert found == []


@pytest.mark.parametrize("name", method_table.METHODS)
def test_an_unknown_option_is_refused_at_construction_with_the_nearest(name):
    method = method_table.METHODS[name]
    with pytest.raises(TypeError, match=f"{name}.*'wiegh'.*'weigh'"):
        method(SmallCNN(), optax.sgd(0.1), **SAID.get(name, {}), wiegh=None)
