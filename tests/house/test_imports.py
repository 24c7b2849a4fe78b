"""What may import what, over the syntax of every file; CONTRIBUTING.md has it in words."""

import ast
from pathlib import Path

import fedjax_bn

ROOT = Path(fedjax_bn.__file__).parent
# Floors from the ground up, modules at the top level and folders alike, with the floors from which
# each imports: all of them are below it. Of those that are not here only `ON_RUN` is asked.
SHARED = "arguments sharing engine task state local_step client aggregation"
BELOW = {
    "arguments": "",
    "sharing": "arguments",
    "engine": "arguments sharing",
    "segmentation": "arguments engine",
    "task": "arguments engine segmentation",
    "state": "sharing engine",
    "local_step": "sharing engine state",
    "client": "sharing engine task state local_step",
    "aggregation": "sharing engine state client",
    "adding": "engine state aggregation",
    "federation": f"{SHARED} adding",
    "normalization": "arguments engine sharing",
    "detection": "arguments engine task",
    "data": "arguments engine",
    "models": "arguments engine sharing normalization detection",
    "adaptation": "arguments engine sharing segmentation normalization models",
    "methods": f"{SHARED} federation normalization data models adaptation",
    "rivals": f"{SHARED} federation normalization models methods segmentation",
    "serving": "arguments engine segmentation sharing models data adaptation",
    "theory": "arguments engine data",
    "tfds": "arguments data",
}
WITHOUT_FLAX = {*list(BELOW)[: list(BELOW).index("normalization")], "data"}
ON_RUN = {"run", "main", "simulation", "flower", "report"}
# Gives the rivals' names to type checkers, and imports a rival when it is first asked for.
EXCEPTIONS = {"methods/__init__.py": {"rivals"}}


def imports_of(path):
    """The modules that a file imports anywhere, "fedjax_bn.run" of `from fedjax_bn import run`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}".split(".") for alias in node.names)


def test_the_floors_are_below_those_that_import_from_them():
    floors = list(BELOW)
    for own, below in BELOW.items():
        assert set(below.split()) <= set(floors[: floors.index(own)]), own


def test_every_file_imports_from_floors_below_its_own_alone():
    wrong = []
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT)
        own, found = name.with_suffix("").parts[0], list(imports_of(path))
        ours = {parts[1] for parts in found if parts[0] == "fedjax_bn"}
        above = set() if own in ON_RUN else {"run"}
        if own in BELOW:
            above |= ours - {own, *BELOW[own].split()} - EXCEPTIONS.get(name.as_posix(), set())
        flax = {"flax"} if own in WITHOUT_FLAX else set()
        wrong += [(str(name), room) for room in above & ours]
        wrong += [(str(name), parts[0]) for parts in found if parts[0] in flax]
    assert wrong == []
