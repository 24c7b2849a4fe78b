"""Over the syntax of every file: what imports what, nobody's private names, constants of keys."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

import fedjax_bn
from fedjax_bn.engine import keys

ROOT = Path(fedjax_bn.__file__).parent
ROUND = "arguments sharing engine task state local_step client aggregation"
# Rooms from the ground up, modules at the top level and folders alike -> the rooms that each one
# imports from, all of them below it.
CORE = {
    "arguments": "",
    "references": "arguments",
    "sharing": "arguments",
    "engine": "arguments sharing",
    "task": "arguments engine",
    "state": "sharing engine",
    "local_step": "sharing engine state",
    "client": "arguments sharing engine task state local_step",
    "aggregation": "sharing engine state client",
    "incremental_aggregation": "engine state aggregation",
    "federation": f"{ROUND} incremental_aggregation",
    "normalization": "arguments engine sharing",
    "models": "arguments engine sharing normalization",
    "adaptation": "arguments engine sharing normalization models",
    "methods": f"{ROUND} federation normalization models adaptation",
}
ABOVE = {
    "contrib": f"{ROUND} federation normalization models methods",
    "tasks": "arguments engine task models",
    "data": "arguments engine",
    "serving": "arguments engine sharing models adaptation contrib data tasks",
    "training": " ".join(CORE) + " contrib data tasks serving",
    "run": " ".join(CORE) + " contrib data tasks serving training",
    "simulation": " ".join(CORE) + " contrib data tasks serving training",
    "flower": " ".join(CORE) + " contrib data tasks training run",
    "report": " ".join(CORE) + " contrib data tasks training run",
    "main": "arguments references run report serving training",
    "__main__": "main",
    "__init__": " ".join(CORE) + " contrib tasks data training run report serving simulation",
}
BELOW = CORE | ABOVE
WITHOUT_FLAX = {*list(CORE)[: list(CORE).index("normalization")], "data"}
NEEDS_OF_THE_CORE = {"jax", "flax", "optax", "numpy", "scipy"}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(tree: ast.AST) -> set[str]:
    """Modules of this library that a file imports anywhere or names in a string."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # What `import_module` takes, also as the beginning of an f-string.
            names |= set(re.findall(r"\Afedjax_bn\.[\w.]*\Z", node.value))
    return names


def rooms_imported(tree: ast.AST) -> set[str]:
    parts = [name.split(".") for name in imported(tree) if name.startswith("fedjax_bn.")]
    return {room for _, room, *_ in parts if room} - {"__version__"}


TREES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def test_the_rooms_are_below_those_that_import_from_them():
    rooms = list(BELOW)
    for room, below in BELOW.items():
        assert set(below.split()) <= set(rooms[: rooms.index(room)]), room


@pytest.mark.parametrize("room", sorted({room_of(path) for path in TREES}))
def test_every_file_imports_from_rooms_below_its_own_alone(room):
    files = {path: rooms_imported(tree) for path, tree in TREES.items() if room_of(path) == room}
    allowed = {room, *BELOW[room].split()}
    above = {str(path.relative_to(ROOT)): rooms - allowed for path, rooms in files.items()}
    assert not {path: rooms for path, rooms in above.items() if rooms}


def at_import(tree: ast.AST) -> set[str]:
    """Packages that are imported when the module itself is: not those within functions."""
    packages, nodes = set(), list(ast.iter_child_nodes(tree))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add((node.module or "").split(".")[0])
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)
    return packages - {"fedjax_bn", *sys.stdlib_module_names}


def test_the_core_needs_five_packages_and_its_ground_no_flax():
    packages = {path: at_import(tree) for path, tree in TREES.items() if room_of(path) in CORE}
    foreign = {str(path): found - NEEDS_OF_THE_CORE for path, found in packages.items()}
    assert not {path: found for path, found in foreign.items() if found}
    flax = [path for path, tree in TREES.items() if "flax" in at_import(tree)]
    assert not [path for path in flax if room_of(path) in WITHOUT_FLAX]


def private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def reached_into(tree: ast.AST) -> set[str]:
    """Private modules, names and attributes of other packages that a module uses."""
    nodes, foreign = list(ast.walk(tree)), {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
        else:
            continue
        foreign |= {name: of for name, of in names if of.split(".")[0] != "fedjax_bn"}
    reached = {of for of in foreign.values() if private(of)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            root, _, attributes = ast.unparse(node).partition(".")
            if root in foreign and private(attributes):
                reached.add(f"{root}.{attributes}")
    return reached - {"os._exit"}  # documented


def test_no_module_reaches_into_another_package():
    assert reached_into(ast.parse("import pickle\nclass A(pickle._Unpickler): ..."))
    assert not {str(path): names for path, tree in TREES.items() if (names := reached_into(tree))}


def calls(name: str) -> list[ast.Call]:
    """All calls of functions of this name."""
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    made = [node for node in nodes if isinstance(node, ast.Call)]
    return [call for call in made if ast.unparse(call.func).split(".")[-1] == name]


def test_keys_are_folded_with_constants_of_the_table_alone_each_used_once():
    for call in calls("fold_in"):
        number = call.args[1]
        assert not isinstance(number, ast.Constant | ast.BinOp), ast.unparse(call)
        assert not ast.unparse(number).isupper(), ast.unparse(call)
    named = [call.args[1] for call in calls("stream") if len(call.args) == 2]
    used = Counter(name.value for name in named if isinstance(name, ast.Constant))
    assert used == Counter(list(keys.STREAMS))
