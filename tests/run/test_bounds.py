"""Whatever a user gives, `read` and `prepare` succeed or raise an error of one line."""

import contextlib
import inspect
import io
import re
from pathlib import Path

import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import runs
from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.arguments.choices import plain_arguments
from fedjax_bn.arguments.errors import ConfigError, UserError
from fedjax_bn.arguments.ranges import BY_KIND
from fedjax_bn.models import MLP, DenseNet121, DigitCNN, ResNet18, TwoLayer
from fedjax_bn.run import commands
from fedjax_bn.run.config.defaults import keys
from fedjax_bn.run.config.file import read
from fedjax_bn.run.config.keys import assign, base, check, override
from fedjax_bn.run.experiment import start
from fedjax_bn.run.experiment.method import METHODS, PERTURBATIONS, SHARING, WEIGHING
from fedjax_bn.run.experiment.task import MODELS, OF_CALLER
from fedjax_bn.run.listing import listing

KEYS = keys()
WITHIN = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
FILE = """
from fedjax_bn.run.config import base, override


def get_config(changes=""):
    config = base()
    config.model = "MLP"
    config.batch_size = 4
    config.target = "dog"
    config.data.name = "tiny"
    config.data.path = "none"
    return override(config, changes)
"""

NUMBERS = [
    *[
        "0",
        "1",
        "2",
        "3",
        "16",
        "100",
        "65536",
        "1000000",
        "-1",
        "-0.0",
        "0.5",
        "0.999",
        "+1",
        "1.",
    ],
    *(str(2**31 - 1), str(2**31), str(2**32), str(2**63 - 1), str(2**63), str(10**30), "10**30"),
    *("9" * 400, "-" + "9" * 400, "9" * 5000, "0x" + "f" * 5000, "1_000", "\u0663", "\u00b3"),
    *("nan", "inf", "-inf", "1e999", "1e308", "-1e308", "1e-320", "1e", "1j", "True", "None"),
]
TEXTS = [
    *("", " ", ",", ",,,", ":", "::", "=", ":=", "x:", ":x", "a=b", "a,b", "x:y", "-", "--", "..."),
    *("[" * 200 + "]" * 200, "[" * 5000, "(" * 5000 + ")" * 5000, "-" * 5000 + "1", "{[]:1}", "{}"),
    *("1+" * 5000 + "1", "a" * 5000, "/".join(["a" * 200] * 30), "1or 2"),
    *("'a'", '"', "b'1'", "\\d"),
    *("\x00", "a\x00b", "a\nb", "\ud800", "\u202e", "\u65e5", "%s", "{0}", "$HOME", "<b>", "null"),
    *("~", "~nouser/x", "/", ".", "..", "../x", __file__, "/dev/null", "tests", "none/at/all"),
    *("lognormal:sigma=1e308", "lognormal:sigma=nan", "lognormal:", "5,5,5"),
    *("dirichlet:alpha=1e-320", "dirichlet:alpha=0.5"),
    *("math:sqrt", "math:pi", "math:", "builtins:len", "builtins:dict", "os:getcwd", "sys:exit"),
    *("..:x", "a.b.c:d", "json:dumps", "flax.linen:Dense:features=3", "fedjax_bn.models:MLP"),
    *("vmap:2", "vmap:0", "vmap:" + "9" * 400, "each", "dog", "ant,bee,cow,dog", "map", "pooled"),
]
TABLES = {
    "method": METHODS,
    "baselines": METHODS,
    "model": MODELS,
    "adaptations": ADAPTATIONS,
    "weigh": WEIGHING,
    "data.perturb": PERTURBATIONS,
    "share": SHARING,
}
OTHER_KEYS = ("", ".", "data", "data.", "rounds.x", "rouds", "\x00", "__class__", "a" * 3000)

numbers = st.sampled_from(NUMBERS)
hostile = st.one_of(numbers, st.sampled_from(TEXTS), st.text(max_size=20))


@st.composite
def spelled(draw, table) -> str:
    """`name:key=value:...` with the name's own keys and others, and any values."""
    name = draw(st.sampled_from(sorted(table)))
    own = list(plain_arguments(table[name], OF_CALLER))
    keys = st.sampled_from([*own, "batch_size", "order", "mask", "nothing"])
    changes = draw(st.lists(st.tuples(keys, st.one_of(numbers, hostile)), max_size=3))
    return ":".join([name, *(f"{key}={value}" for key, value in changes)])


@st.composite
def changes(draw) -> tuple[str, str]:
    """A key, nearly always one that there is, and a value, right or wrong."""
    key = draw(st.sampled_from([*KEYS, *KEYS, *KEYS, *OTHER_KEYS]))
    choices = [hostile]
    if key in TABLES:
        choices += [spelled(TABLES[key])] * 2
    if key in KEYS and KEYS[key].range.names:
        choices += [st.sampled_from(KEYS[key].range.names)]
    if key in KEYS and KEYS[key].kind in (int, float):
        choices += [numbers] * 2
    return key, draw(st.one_of(choices))


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bounds") / "tiny.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(start.build.__globals__["DATASETS"], "tiny", lambda config: runs.DATA)


def sentence(error: UserError) -> str:
    text = str(error)
    assert text.strip()
    assert "\n" not in text
    assert len(text) < 3000
    return text


@contextlib.contextmanager
def sentences():
    """Lets an error for the user pass if its message has one line."""
    try:
        yield
    except UserError as error:
        sentence(error)


@settings(WITHIN, max_examples=50)
@given(drawn=st.lists(changes(), min_size=1, max_size=5))
def test_every_reading_ends_in_a_configuration_or_a_sentence(file, drawn):
    behind = ",".join(f"{key}={value}" for key, value in drawn)
    readings = [(f"{file}:{behind}", []), (str(file), drawn)]
    readings += [(value, []) for _, value in drawn[:1]]
    for source, given_changes in readings:
        with sentences():
            check(read(source, given_changes))
    for key, value in drawn:
        with sentences():
            assign(config := base(), key, value)
            check(config)


@settings(WITHIN, max_examples=25)
@given(drawn=st.lists(changes(), min_size=1, max_size=3), joined=st.booleans())
def test_every_command_line_ends_in_a_prepared_run_or_a_sentence(file, tiny, drawn, joined):
    arguments = [
        part
        for key, value in drawn
        for part in ([f"--config.{key}={value}"] if joined else [f"--config.{key}", value])
    ]
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(commands, "train_all", lambda config, *_: start.prepare(config))
        status = runs.command("--config", str(file), *arguments)
    lines = said.getvalue().splitlines()
    assert status in (0, 2)
    assert len(lines) == (status == 2)
    assert all(line.startswith("fedjax_bn: ") for line in lines)


CANNOT_RUN = [
    "batch_size=1" + "0" * 30,
    "local_steps=9223372036854775807",
    "rounds=2147483648",
    "local_epochs=10000000",
    "client_epochs=1000000,1,1",
    "client_epochs=\u0663,1,1",
    "optimizer.momentum=1",
    "seed=4294967296",
    "data.image_size=100000",
    "data.sizes=9223372036854775808",
    "data.sizes=5:smallest=3",
    "data.partition=dirichlet:smallest=0",
    "data.partition=iid:smallest=3",
    "data.partition=nonsense",
    "data.partition=dirichlet:alpha=1e308",
    "optimizer.learning_rate=1e-50",
    "optimizer.weight_decay=1e-39",
    "compilation_cache=a://b",
    "data.cache=~no-such-user/x",
    "data.path=~no-such-user/x",
    "data.path=a\x00b",
    "model=" + "a" * 5000,
]


@pytest.mark.parametrize("text", CANNOT_RUN, ids=lambda text: text[:40].replace("\x00", "0"))
def test_a_value_that_cannot_run_is_refused_with_what_is_allowed(text):
    key = text.partition("=")[0]
    with pytest.raises(ConfigError, match=f"config.{key}=.* must be ") as caught:
        check(override(base(), text))
    sentence(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model=DigitCNN:width=0", "width=0 must be at least 1 and at most 16384"),
        ("model=DigitCNN:width=99999999", "width=99999999 must be at least 1"),
        ("model=ResNet", "missing a required argument: 'stage_sizes'"),
        ("adaptations=tsmobn:momentum=2", "momentum=2.0 must be at least 0 and at most 1"),
        ("adaptations=tsmobn:about=mean", "about='mean' is unknown; valid are batch, tracked"),
        ("adaptations=running:batch_size=0", "batch_size=0 must be at least 1"),
        ("adaptations=running:order=-2", "order=-2 must be -1, or a seed below"),
        ("adaptations=mixnorm:views=10000", "views=10000 must be at least 1"),
        ("weigh=risk_extrapolation:eta=-1", "eta=-1.0 must be at least 0"),
        ("weigh=risk_extrapolation:solver=newton", "solver='newton' is unknown"),
        ("model=ResNet18", "this network reads images f[B, H, W, C], not samples of shape (6,)"),
        ("weigh=math:sqrt", "config.weigh='math:sqrt' fails (TypeError"),
        ("share=builtins:len", "config.share='builtins:len' must give a boolean for each"),
        (
            "data.perturb=amplitude_mix:probability=2",
            "probability=2.0 must be at least 0 and at most 1",
        ),
        ("data.perturb=amplitude_mix", "amplitude_mix needs images"),
        ("method=fedig:mixing=uniform:low=1:high=0", "low=1 must be at most high=0"),
        ("method=fedig:mixing=mixstyle:probability=2", "probability=2.0 must be at least 0"),
        ("method=fedadam:eta=1e-46", "eta=1e-46 must be 0, or at least 1.2e-38"),
        ("method=feddc:alpha=" + "9" * 400, "must be a finite number"),
        ("data.name=abide:window=1", "window=1 must be 0, or from 2"),
        ("optimizer.schedule=step", "step needs rounds"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(tiny, file, text, said):
    with pytest.raises(ConfigError) as caught:
        start.prepare(read(f"{file}:{text}"))
    assert said in sentence(caught.value)


def test_a_state_larger_than_the_memory_is_refused(tiny, file, monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 10)
    with pytest.raises(ConfigError, match="GB of this machine: choose a smaller model or fewer"):
        start.prepare(read(str(file)))


FACTORIES = [
    *(METHODS[name] for name in METHODS),
    *(*ADAPTATIONS.values(), *WEIGHING.values(), *PERTURBATIONS.values()),
    *(MLP, DenseNet121, DigitCNN, ResNet18, TwoLayer),
]
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
    needs = [p for p in inspect.signature(factory).parameters if p in ("model", "optimizer")]
    given = {"model": MLP(), "optimizer": optax.sgd(0.1)}
    for value in wrong:
        with pytest.raises(ValueError, match=f"{key}=.* must be "):
            factory(**{name: given[name] for name in needs}, **{key: value})


@pytest.mark.parametrize("kind", ["methods", "models", "adaptations", "weights"])
def test_what_a_list_says_of_a_thing_is_not_cut_off(kind):
    for line in listing([kind]).splitlines():
        assert not re.search(r"(,| (and|or|the|of|clients minimize))( {2,}.*)?$", line), line


def test_list_keys_prints_the_range_of_every_key():
    lines = dict(line.split(maxsplit=1) for line in listing(["keys"]).splitlines())
    assert set(lines) == set(KEYS)
    for name, key in KEYS.items():
        if key.range not in BY_KIND.values():
            assert key.range.text
            assert key.range.text in lines[name]
