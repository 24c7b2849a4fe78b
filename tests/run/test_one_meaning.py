"""A method means the same on the command line and in Python, and `run/` knows no method's name."""

import ast
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.models import SmallCNN
from fedjax_bn.run.config import base
from fedjax_bn.run.experiment import build
from fedjax_bn.run.experiment.method import local_optimizer
from fedjax_bn.run.experiment.model import choose_loading
from fedjax_bn.training.start import initial_variables, make_keys, make_start
from method_table import METHODS

RUN = Path(build.__file__).parents[1]
# What a user has to say in either way: how much feddg shows, and that fedwon has no batch norm.
SAID = {"feddg": {"spectra": 2}}
OFTEN = ("fediga",)  # which adds most to the common program
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
    method = METHODS[name](experiment.model, local_optimizer(config), **given)

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
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in METHODS]
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
    names, found = {*METHODS}, []
    for file in sorted({*RUN.rglob("*.py")} - {RUN / "config" / "defaults.py"}):
        tree = ast.parse(file.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = getattr(node, "attr", "") or getattr(node, "value", "")
            if id(node) not in prose and isinstance(text, str):
                found += [(file.name, name) for name in names & {*re.findall(r"\w+", text)}]
    assert found == []


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_option_is_refused_at_construction_with_the_nearest(name):
    method = METHODS[name]
    with pytest.raises(TypeError, match=f"{name}.*'wiegh'.*'weigh'"):
        method(SmallCNN(), optax.sgd(0.1), **SAID.get(name, {}), wiegh=None)
