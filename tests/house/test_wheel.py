"""The built wheel without its dependencies: the core needs jax, flax, optax, numpy and scipy."""

import shutil
import subprocess
import sys
import zipfile

import pytest

import runs

pytestmark = pytest.mark.slow  # a release builds it; test_imports.py reads what the core imports
# Runs in a process of its own, from a folder that has the wheel's files alone.
PROGRAM = """
import re, sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions

def names_of(requirements):
    plain = [text for text in requirements or () if "extra ==" not in text]
    return {re.match(r"[\\w.-]+", text)[0] for text in plain}

def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()

needed, unread = set(), {"jax", "flax", "optax", "numpy", "scipy"}
while unread:
    name = unread.pop()
    needed.add(normalized(name))
    try:
        requirements = names_of(distribution(name).requires)
    except PackageNotFoundError:  # of another platform
        continue
    unread |= {other for other in requirements if normalized(other) not in needed}
hidden = {
    package for package, owners in packages_distributions().items()
    if not needed & {normalized(owner) for owner in owners}
} - {"fedjax_bn"}

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
assert {"PIL", "matplotlib", "ml_collections", "sklearn", "tqdm"} <= hidden

import importlib, pkgutil
from pathlib import Path
import fedjax_bn

folder = Path(fedjax_bn.__file__).parent
assert folder.parent == Path(sys.argv[1]), folder
for room in sys.argv[2:]:
    module = importlib.import_module(f"fedjax_bn.{room}")
    for part in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
        importlib.import_module(part.name)

import jax, numpy as np, optax
from fedjax_bn.methods import fedbn
from fedjax_bn.models import MLP

model = MLP(num_classes=2, hidden=(4,))
batches = {
    "image": np.random.default_rng(0).integers(0, 256, (2, 1, 4, 8, 8, 3), np.uint8),
    "label": np.arange(8, dtype=np.int32).reshape(2, 1, 4) % 2,
    "valid": np.ones((2, 1, 4), bool),
}
method, key = fedbn(model, optax.sgd(0.1)), jax.random.key(0)
variables = model.init(key, np.zeros((1, 8, 8, 3), np.float32))
state, metrics = method.round(method.init(key, variables, 2), batches, key)
assert np.isfinite(metrics["loss"]).all()
print("made a round")
"""
CORE = (
    *("adaptation", "aggregation", "arguments", "client", "engine", "federation"),
    "incremental_aggregation",
    *("local_step", "methods", "models", "normalization", "sharing", "state", "task", "contrib"),
)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The files of the wheel, built from a copy, because building writes beside the source."""
    pytest.importorskip("setuptools", minversion="77")
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("fedjax_bn", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(runs.ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(runs.ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_the_core_of_the_built_wheel_makes_a_round_of_fedbn_with_five_packages(unpacked, tmp_path):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1])\n{PROGRAM}"]
    ran = subprocess.run(
        [*command, unpacked, *CORE], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.stdout == "made a round\n", ran.stderr


def test_the_wheel_has_the_configs_the_command_and_the_marker_of_types(unpacked):
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    source = {str(path.relative_to(runs.ROOT)) for path in runs.ROOT.glob("fedjax_bn/**/*.py")}
    configs = {f"fedjax_bn/configs/{path.name}" for path in runs.ROOT.glob("configs/*.py")}
    assert source | configs | {"fedjax_bn/py.typed"} <= names
    (entries,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "fedjax-bn = fedjax_bn.main:command" in entries.read_text()
