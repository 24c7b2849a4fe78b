"""What a user meets first: names, lists, packaged configs, own code; and what a start spares."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from sklearn.datasets import load_digits, load_sample_image

import fedjax_bn as fb
import runs
from fedjax_bn import main, models
from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.arguments.choices import REQUIRED, plain_arguments, read_choice
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.sets import scanners
from fedjax_bn.engine.backend import for_one_run
from fedjax_bn.run import listing
from fedjax_bn.run.config import file as config_file
from fedjax_bn.run.config.choices import CLOSED
from fedjax_bn.run.config.defaults import KEYS
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment import method as configured_method
from fedjax_bn.run.experiment.model import AUGMENTATIONS, MODELS, TASKS
from fedjax_bn.training.programs import keep_compiled

PACKAGE = Path(fb.__file__).parent
# Modules that are no part of the face: the program, and helpers of the others.
INNER = {"__main__", "arguments", "flower", "main", "references", "run"}
FUNCTIONS = {"cite", "load_run", "simulate"}
OWN = """
from functools import partial
import flax.linen as nn
from flax import nnx
from fedjax_bn.adaptation import running
from fedjax_bn.methods import fedprox

class Graph(nnx.Module):
    def __init__(self, num_classes: int, *, width: int = 3, rngs: nnx.Rngs):
        self.dense = nnx.Linear(6, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(self.dense(x)))


class Net(nn.Module):
    num_classes: int
    width: int = 3
    @nn.compact
    def __call__(self, images):
        images = images.reshape(images.shape[0], -1)
        return nn.Dense(self.num_classes)(nn.relu(nn.Dense(self.width)(images)))

SEEN = {}

class Few(Net):
    @nn.compact
    def __call__(self, images):
        return nn.Dense(2)(images.reshape(images.shape[0], -1))

def fedfoo(model, optimizer, *, strength: float = 0.5, **options):
    SEEN.update(options, strength=strength)
    return fedprox(model, optimizer, mu=strength, **options)

def adapt(model, *, times: int = 1):
    return running(model)

def share_all(variables):
    return f"shared {variables}"

def squared(sizes, risks, *, power: float = 2.0):
    return sizes.astype(risks.dtype) ** power

def squaring(power: float = 2.0):
    return partial(squared, power=power)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module, beside no checkout."""
    (tmp_path / "own_code.py").write_text(OWN)
    (tmp_path / "broken_code.py").write_text("import no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_code", None)


def made(**changes: object) -> experiment.Experiment:
    return experiment.assemble(runs.config(**changes), runs.DATA, ())


IMPORTS = """
import sys, fedjax_bn
def loaded(*libraries):
    return {name.partition(".")[0] for name in sys.modules} & {*libraries}
dir(fedjax_bn)
assert not loaded("jax", "flax", "numpy", "absl", "ml_collections")
import fedjax_bn.main  # before flags are parsed
assert not loaded("jax", "flax")
"""


def test_importing_the_package_or_the_command_imports_no_library():
    assert subprocess.run([sys.executable, "-c", IMPORTS], cwd=PACKAGE.parent).returncode == 0


def test_the_face_is_every_module_but_the_inner_ones_and_all_of_it_is_there():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(fb.__all__) == modules - INNER | FUNCTIONS
    assert fb.simulate is fb.simulation.simulate
    assert fb.cite is importlib.import_module("fedjax_bn.references").cite
    assert fb.load_run is importlib.import_module("fedjax_bn.run.files.finished_run").load_run
    for name in set(fb.__all__) - FUNCTIONS:
        assert getattr(fb, name) is importlib.import_module(f"fedjax_bn.{name}")
    assert set(fb.__all__) <= set(dir(fb))
    with pytest.raises(AttributeError, match="'fedbn'"):
        _ = fb.fedbn


def test_a_name_of_a_packaged_config_stands_for_its_file(tmp_path, monkeypatch):
    packaged = config_file.read(str(config_file.packaged_configs()["digits"]))
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "digits.py", "configs/digits.py"):
        assert config_file.read(name) == packaged
    with pytest.raises(ConfigError, match=r"'my/digits.py'.*'digits'"):
        config_file.read("my/digits.py")
    (tmp_path / "digits.py").touch()  # a file comes before a packaged config
    with pytest.raises(ConfigError, match="get_config"):
        config_file.read("digits.py")


TABLES = {
    "methods": configured_method.METHODS,
    "models": MODELS,
    "datasets": experiment.DATASETS,
    "adaptations": ADAPTATIONS,
    "weights": configured_method.WEIGHING,
    "augmentations": AUGMENTATIONS,
    **CLOSED,
    "tasks": TASKS,
    "configs": config_file.packaged_configs(),
    "keys": KEYS,
}


def entries(out: str) -> dict[str, str]:
    """The lists' entries, name -> all its words; lines below the first are indented."""
    texts = [" ".join(text.split()) for text in re.split(r"\n(?=\S)", out)]
    return {re.split(r"[:= ]", text.lstrip(":"))[0]: text for text in texts}


@pytest.mark.parametrize("kind", listing.LISTS)
def test_a_list_has_an_entry_with_words_for_each_on_narrow_lines(kind, capsys):
    assert runs.command("list", kind) == 0
    out = capsys.readouterr().out
    assert list(entries(out)) == list(TABLES[kind])
    assert all(" " in text for text in entries(out).values())
    assert all(len(line) <= 80 for line in out.splitlines() if line.startswith(" "))


def test_every_key_has_a_sentence_and_a_range_that_holds_its_default():
    for name, key in KEYS.items():
        assert re.fullmatch(r"[A-Z].*\.", key.meaning), name
        assert not key.refusal(key.default), name


@pytest.mark.parametrize(
    ("kind", "name", "option", "words"),
    [
        ("methods", "fediga", ":lambda_1=0.1", "weight of CACL"),
        ("models", "ResNet18", ":width=64", "int at least 1"),
        ("adaptations", "tsmobn", ":momentum=0.9", "weight of the past"),
        ("keys", "optimizer.learning_rate", "optimizer.learning_rate=0.01", "(float above 0)"),
        ("keys", "on_nonfinite", "on_nonfinite=stop", "(stop or drop)"),
    ],
)
def test_the_options_of_a_name_have_default_type_and_meaning(capsys, kind, name, option, words):
    assert runs.command("list", kind, name) == 0
    (text,) = [text for text in entries(capsys.readouterr().out).values() if option in text]
    assert words in text


def test_config_prints_the_resolved_run_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ("--config.method=fedprox:mu=0.1", "--config.share=all_but_batch_norm")
    assert runs.command("config", "quickstart", "--config.compilation_cache=", *words) == 0
    out = capsys.readouterr().out
    for part in (
        "fedprox:mu=0.1 on SmallDigitCNN:width=16, 5 clients",
        "flatbed: 180, 30, 537",
        "float32[16, 28, 28, 3], int32[16]",
        "shared: 12 leaves, 456,314 values",
        "personal: 20 leaves, 1,792 values",
        "1,825,260 bytes down",
    ):
        assert part in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"), [("model", "did you mean 'models'?"), ("models Resnet18", "ResNet18")]
)
def test_a_list_that_is_not_there_is_one_sentence(words, said, capfd):
    assert runs.command("list", *words.split()) == 2
    assert said in capfd.readouterr().err


def test_help_and_version_work_in_a_process_of_their_own():
    said = {"--version": [fb.__version__], "-h": main.COMMANDS, "list configs": ["pacs"]}
    for words, parts in said.items():
        command = [sys.executable, "-m", "fedjax_bn", *words.split()]
        done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert all(part in done.stdout for part in parts)


def test_a_users_own_model_method_share_weigh_and_adaptation_need_no_fork(own):
    text = "own_code:adapt:times=2:batch_size=3"
    built = made(
        model="own_code:Net:width=5",
        method="own_code:fedfoo:strength=0.25",
        share="own_code:share_all",
        weigh="own_code:squared:power=3",
        adaptations=(text,),
    )
    assert type(built.model).__name__ == "Net"
    assert (built.model.width, built.model.num_classes) == (5, 3)
    assert built.adaptations[text].batch_size == 3
    seen = sys.modules["own_code"].SEEN
    assert seen["strength"] == 0.25
    assert seen["share"](3) == "shared 3"
    assert seen["weigh"](jnp.asarray([1, 2]), jnp.ones(2)).tolist() == [1, 8]
    made(method="own_code:fedfoo", weigh="own_code:squaring:power=2")
    assert seen["weigh"](jnp.asarray([1, 2]), jnp.ones(2)).tolist() == [1, 4]


def test_a_users_own_nnx_class_is_made_with_the_runs_seed(own):
    models = [made(model="own_code:Graph:width=5", seed=seed).model for seed in (0, 0, 1)]
    kernels = [
        np.asarray(model.init(jax.random.key(0), jnp.zeros((1, 6)))["params"]["dense"]["kernel"])
        for model in models
    ]
    assert kernels[0].shape == (6, 5)
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert np.abs(kernels[0] - kernels[2]).max() > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "broken_code:Net"}, "ModuleNotFoundError: No module named 'no_such_thing'"),
        ({"model": "own_code:absent"}, "AttributeError"),
        ({"model": "own_code:Net:hight=3"}, "'hight=3'.*width"),
        ({"model": "own_code:fedfoo"}, "missing a required argument: 'model'"),
        ({"model": "own_code:Few"}, "2 outputs for the 3 classes"),
        ({"method": "own_code:Net"}, "needs num_classes"),
    ],
)
def test_own_code_that_does_not_suit_is_one_sentence(own, changes, said):
    with pytest.raises(ValueError, match=said) as caught:
        made(**changes)
    assert "\n" not in str(caught.value)
    assert next(iter(changes))[:5] in str(caught.value)


def test_types_and_defaults_are_read_off_the_signature():
    def function(first, rate: float | None = None, *, size: int, on=True, names=(), **more) -> None:
        del first, rate, size, on, names, more

    table = {"f": function}
    kinds = {k: argument[:2] for k, argument in plain_arguments(function, given=("more",)).items()}
    assert kinds == {"rate": (float, None), "size": (int, REQUIRED), "on": (bool, True)}
    options = {"size": 3, "rate": 1.0, "on": False}
    assert read_choice("f", "f:size=3:rate=1:on=False", table) == (function, options)
    for text, said in (
        ("f", "f needs size"),
        ("f:size=3.0", "size=.* must be int"),
        ("f:size=True", "size=.* must be int"),
        ("f:size=3:names=a", "on, rate, size"),
        ("g", "is unknown; valid are f"),
    ):
        with pytest.raises(ValueError, match=said):
            read_choice(text, text, table)


def test_handwriting_and_photograph_are_those_of_scikit_learn_without_its_import(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)  # not importable
    ink, labels = scanners.handwriting()
    photograph = scanners.to_pixels(scanners.shrunk_photograph("china", 4, np.float64))
    monkeypatch.undo()
    digits, image = load_digits(), load_sample_image("china.jpg")
    np.testing.assert_array_equal(ink * 16, digits.images)
    np.testing.assert_array_equal(labels, digits.target)
    assert photograph.shape == (image.shape[0] // 4, image.shape[1] // 4, 3)
    np.testing.assert_allclose(photograph[0, 0], image[:4, :4].mean((0, 1)), atol=0.5 + 1e-6)


@pytest.mark.slow
def test_a_program_for_one_run_gives_the_bits_of_any_other(optimized):
    def init(key):
        return models.SmallCNN(widths=(16,)).init(key, jnp.zeros((2, 8, 8, 3)))

    key = jax.random.key(0)
    quick = for_one_run(init)
    jax.tree.map(np.testing.assert_array_equal, quick(key), jax.jit(init)(key))
    # What only asks for the form of the result traces it inside another program.
    assert jax.eval_shape(quick, key) == jax.eval_shape(init, key)


SETTINGS = {
    "jax_compilation_cache_dir": None,
    "jax_compilation_cache_max_size": -1,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_enable_compilation_cache": True,
}
HIT, MISS = (f"/jax/compilation_cache/cache_{what}" for what in ("hits", "misses"))


@pytest.fixture
def events(monkeypatch):
    """Turns the cache on for one test and keeps every program; lists hits and misses."""
    for name in [name for name in os.environ if name.startswith(("JAX_COMPIL", "JAX_PERSIST"))]:
        monkeypatch.delenv(name)  # the suite's own
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    before, seen = {name: getattr(jax.config, name) for name in SETTINGS}, []
    # The oldest JAX cannot take it back.
    jax.monitoring.register_event_listener(
        lambda event, **rest: seen.append(event) if event in (HIT, MISS) else None
    )
    for settings in (SETTINGS, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        reset_cache()
        if settings is SETTINGS:
            yield seen


def compile_and_run() -> float:
    """Compiles a program again and runs it."""
    return float(jax.jit(lambda x: jnp.sin(x).sum())(np.arange(7, dtype=np.float32)))


def test_a_kept_program_is_found_again_and_a_half_written_one_is_dropped(tmp_path, events):
    fresh = compile_and_run()  # nothing is kept yet
    assert not events
    keep_compiled(str(tmp_path))
    assert [compile_and_run() for _ in range(2)] == [fresh] * 2
    assert events == [MISS, HIT]

    for path in tmp_path.glob("*-cache"):  # killed while it wrote: JAX writes the time afterwards
        path.write_bytes(path.read_bytes()[:100])
        path.with_name(path.name.replace("-cache", "-atime")).unlink()
    (tmp_path / "gone-atime").write_bytes(bytes(8))  # killed while it removed
    (tmp_path / "a user's file").touch()
    keep_compiled(str(tmp_path))
    assert set(os.listdir(tmp_path)) - {".lockfile"} == {"a user's file"}
    events.clear()
    assert compile_and_run() == fresh
    assert events == [MISS]
