"""The configuration: keys, types and ranges, from the command line and from config files."""

import pytest

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.run.config.file import read
from fedjax_bn.run.config.keys import (
    base,
    check,
    flatten,
    override,
)

VALID = [
    # text, key, value
    ("rounds=3", "rounds", 3),
    ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
    ("data.fraction=1", "data.fraction", 1.0),
    ("data.fraction=None", "data.fraction", None),
    ("method=fedavg", "method", "fedavg"),
    ("method='fedavg'", "method", "fedavg"),
    ("data.path=123", "data.path", "123"),
    ("data.path=a=b", "data.path", "a=b"),
    ("clients=vmap:at_once=2", "clients", "vmap:at_once=2"),
    ("method=fedcd:bounds=0,1", "method", "fedcd:bounds=0,1"),
    ("baselines=fedavg,fedprox:mu=0.1", "baselines", ("fedavg", "fedprox:mu=0.1")),
    ("target=", "target", ""),
    ("adaptations=batch", "adaptations", ("batch",)),
    ("adaptations=running,batch", "adaptations", ("running", "batch")),
    ("adaptations=('running', 'batch')", "adaptations", ("running", "batch")),
    ("baselines=", "baselines", ()),
]

WRONG_TYPE = [
    # text, the type that is allowed
    ("rounds=1.5", "int"),
    ("rounds=many", "int"),
    ("rounds=True", "int"),
    ("seed=(1,)", "int"),
    ("optimizer.learning_rate=fast", "float"),
    ("optimizer.learning_rate=(0.1,)", "float"),
    ("adaptations=3", "a tuple of names"),
]

OUT_OF_RANGE = [
    # key, value, what the message must hold
    ("rounds", 0, "at least 1"),
    ("seed", -1, "at least 0"),
    ("seed", 2**32, "below 2**32"),
    ("local_steps", -1, "at least 0"),
    ("optimizer.momentum", -0.1, "at least 0"),
    ("optimizer.learning_rate", 0.0, "above 0"),
    ("optimizer.learning_rate", float("nan"), "finite"),
    ("optimizer.learning_rate", float("inf"), "finite"),
    ("data.fraction", 0.0, "above 0 and at most 1"),
    ("data.fraction", 2.0, "above 0 and at most 1"),
    ("on_nonfinite", "ignore", "valid are drop, stop"),
]


def write(tmp_path, body: str) -> str:
    """A config file with this body of get_config, as `config.read` takes it."""
    file = tmp_path / "mine.py"
    indented = "\n".join("    " + line for line in body.splitlines())
    head = "from fedjax_bn.run.config.keys import base, override\n\n\ndef get_config(changes=''):\n"
    file.write_text(
        f"{head}    config = base()\n{indented}\n    return override(config, changes)\n"
    )
    return str(file)


def test_the_defaults_are_valid_and_every_key_has_one():
    check(base())
    assert dict(flatten(base()))["data.name"] == "scanners"


@pytest.mark.parametrize(("text", "key", "value"), VALID)
def test_a_value_means_the_same_after_the_file_and_as_a_flag(tmp_path, text, key, value):
    file = write(tmp_path, "")
    inline = dict(flatten(read(f"{file}:{text}")))
    flag = dict(flatten(read(file, [tuple(text.split("=", 1))])))
    assert inline == flag
    assert inline[key] == value
    assert type(inline[key]) is type(value)


def test_several_changes_may_have_commas_within_a_value():
    config = override(base(), "adaptations=running,batch,rounds=3,data.path=a,b,seed=1,")
    assert config.adaptations == ("running", "batch")
    assert (config.rounds, config.data.path, config.seed) == (3, "a,b", 1)


@pytest.mark.parametrize(("text", "kind"), WRONG_TYPE)
def test_a_wrong_type_names_key_value_and_the_type_that_is_allowed(tmp_path, text, kind):
    key, value = text.split("=", 1)
    file = write(tmp_path, "")
    messages = []
    for source, changes in ((f"{file}:{text}", []), (file, [(key, value)])):
        with pytest.raises(ConfigError) as error:
            read(source, changes)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"config.{key}=")
    assert f"it must be {kind}" in messages[0]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rouds", "rounds"),
        ("learning_rate", "'optimizer.learning_rate'"),
        ("optimizer.learn_rate", "'optimizer.learning_rate'"),
        ("batch", "'mesh.batch'"),
        ("num_clients", "'data.num_clients'"),
        ("momentum", "'optimizer.momentum'"),
        ("num_local_epochs", "'local_epochs'"),
        ("xyzzy", "config has no key 'xyzzy'; `fedjax-bn list keys` names all"),
        ("data.fractoin", "data.fraction"),
        ("rounds.x", "rounds"),
        ("data", "data.clients_per_domain, data.device_megabytes"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(key, meant):
    with pytest.raises(ConfigError) as error:
        override(base(), f"{key}=1")
    assert key in str(error.value)
    assert meant in str(error.value)


def test_a_change_without_equals_is_refused():
    with pytest.raises(ConfigError, match="key=value"):
        override(base(), "fast,rounds=3")


@pytest.mark.parametrize(("key", "value", "allowed"), OUT_OF_RANGE)
def test_a_value_out_of_range_names_key_value_and_range(key, value, allowed):
    config = base()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError) as error:
        check(config)
    assert f"config.{key}={value}" in str(error.value).replace("'", "")
    assert allowed in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("privacy.noise=1", "noise=1 is in units of privacy.clip: set that above 0"),
        ("start_from=./a,pretrained=b", "start_from='./a' and config.pretrained='b' exclude"),
    ],
)
def test_keys_that_exclude_each_other_are_named_together(changes, message):
    with pytest.raises(ConfigError, match=message):
        check(override(base(), changes))


MADE = "from ml_collections import ConfigDict; return ConfigDict"
IN_A_FILE = [
    # body of get_config, and what the message holds: mistakes in keys and values,
    ("config.rouds = 3", "no key 'rouds'; did you mean 'rounds'"),
    ("config.data.fractoin = 0.1", "did you mean 'data.fraction'"),
    ("config.rounds = True", "rounds=True is of type bool"),
    ("config.rounds = None", "rounds=None is of type NoneType"),
    ('config.mesh = "1"', "config.mesh is a group of keys: set one of mesh.batch, mesh.clients"),
    ('config.data.partition = "drawn:9"', "must be iid, dirichlet:alpha=A:smallest=N, drawn"),
    ("config.batch_size = int('9' * 4000)", "config.batch_size=9999"),
    # files that fail,
    ("x = (", "mine.py, line 6: '(' was never closed"),
    ("config.rounds = 0.5", "mine.py fails (TypeError: Could not override field 'rounds'"),
    ("undefined", "mine.py fails (NameError: name 'undefined' is not defined)"),
    ("import no_such_module", "mine.py fails (ModuleNotFoundError: No module named"),
    ("raise SystemExit(0)", "mine.py fails (SystemExit: 0)"),
    # and configurations of another form
    ("return 3", "returns int, but it must return a ConfigDict"),
    (f"{MADE}()", "lacks adapt_batch_size"),
    (f"{MADE}({{'data': 3}})", "data is a group"),
    (f"{MADE}({{1: 2, 'a': 3}})", "(TypeError"),
    (f"{MADE}({{1: 2}})", "no key '1'"),
]


@pytest.mark.parametrize(("body", "message"), IN_A_FILE)
def test_a_mistake_in_a_config_file_is_named_in_one_line(tmp_path, body, message):
    with pytest.raises(ConfigError) as error:
        check(read(write(tmp_path, body), [("data.name", "tiny")]))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_frozen_configuration_can_be_changed(tmp_path):
    body = "from ml_collections import FrozenConfigDict; return FrozenConfigDict(config)"
    assert read(write(tmp_path, body), [("rounds", "3")]).rounds == 3


def test_a_file_without_get_config_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("rounds = 3\n")
    with pytest.raises(ConfigError, match="get_config"):
        read(str(tmp_path / "mine.py"))


def test_a_config_file_may_take_no_changes(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from fedjax_bn.run.config.keys import base as get_config\n")
    assert read(str(file)).rounds == base().rounds
    with pytest.raises(ConfigError, match="get_config\\(changes=''\\)"):
        read(f"{file}:rounds=3")


@pytest.mark.parametrize("path", ["nowhere.py", "", "."])
def test_a_missing_config_file_is_named(path):
    with pytest.raises(ConfigError, match=f"'{path}'"):
        read(path)


@pytest.mark.parametrize("text", ["1,3", "(1, 3)", "['1', 3]"])
def test_numbers_in_a_tuple_are_its_texts(text):
    assert override(base(), f"data.severities={text}").data.severities == ("1", "3")


OF_NO_TYPE = {
    "compilation_cache": "[1]",
    "data.cache": "None",
    "rounds": "'\\ud800'",
    "optimizer.learning_rate": "[[]]",
    "baselines": "1j",
    "target": "b'x'",
    "data.fraction": "{}",
}


@pytest.mark.parametrize("key", OF_NO_TYPE)
def test_a_value_of_another_type_in_a_file_is_refused_before_it_is_used(tmp_path, key):
    path = tmp_path / "config.py"
    path.write_text(
        "from fedjax_bn.run.config.keys import base\n"
        "def get_config():\n    config = base()\n    with config.ignore_type():\n"
        f"        config.{key} = {OF_NO_TYPE[key]}\n    return config\n"
    )
    with pytest.raises(ConfigError, match=f"^config.*{key}.*") as caught:
        read(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["compilation_cache", "data.cache"])
def test_a_cache_is_a_folder_with_a_beginning_and_no_word(key):
    for text in ("None", "none", "$x^$", "False", "cache", "$HOME/x", "0", "a/b"):
        with pytest.raises(ConfigError, match="must be empty for none, or a folder that begins"):
            check(override(base(), f"{key}={text}"))
    for text in ("", "/tmp/x", "./x", "../x", "~", "~/x"):
        check(override(base(), f"{key}={text}"))
    check(override(base(), "compilation_cache=gs://bucket/x"))
