"""What may import what, over the syntax of every file; CONTRIBUTING.md has it in words."""

import ast
from pathlib import Path

import fedjax_bn

ROOT = Path(fedjax_bn.__file__).parent
# These modules and the folder engine/ are the ground floor.
ENGINE = {"aggregation", "client", "federation", "local_optimizer", "local_step", "sharing"}
ENGINE |= {"state", "task"}
# Room -> rooms below it; of rooms that are not here nothing is asked but what `ON_RUN` asks.
BELOW = {
    "arguments": "",
    "engine": "arguments",
    "normalization": "engine arguments",
    "detection": "engine arguments",
    "data": "engine arguments",
    "models": "arguments engine normalization detection",
    "methods": "arguments engine normalization models data",
    "rivals": "arguments engine normalization models methods",
    "adaptation": "arguments engine normalization models",
    "serving": "arguments engine models data adaptation",
    "theory": "arguments engine data",
    "tfds": "arguments engine data",
}
ON_RUN = {"run", "main", "simulation", "flower", "report"}
EXCEPTIONS = {
    # Scores a client's model on its validation samples in each round, so it makes a pass.
    "engine/selection.py": {"adaptation", "data", "normalization"},
    # Gives the rivals' names to type checkers, and imports a rival when it is first asked for.
    "methods/__init__.py": {"rivals"},
}


def room_of(parts):
    return "engine" if parts[0] in ENGINE else parts[0]


def imports_of(path):
    """The modules that a file imports anywhere, "fedjax_bn.run" of `from fedjax_bn import run`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}".split(".") for alias in node.names)


def test_every_file_imports_from_rooms_below_its_own_alone():
    wrong = []
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT)
        own, found = room_of(name.with_suffix("").parts), list(imports_of(path))
        ours = {room_of(parts[1:]) for parts in found if parts[0] == "fedjax_bn"}
        above = set() if own in ON_RUN else {"run"}
        if own in BELOW:
            above |= ours - {own, *BELOW[own].split()} - EXCEPTIONS.get(name.as_posix(), set())
        flax = {"flax"} if own in ("engine", "data") else set()
        wrong += [(str(name), room) for room in above & ours]
        wrong += [(str(name), parts[0]) for parts in found if parts[0] in flax]
    assert wrong == []
