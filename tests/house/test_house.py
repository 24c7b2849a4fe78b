"""What sources must not do: reach into other packages, choose constants of keys, parse strings."""

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

import runs
from fedjax_bn.engine import keys

SOURCES = {
    path: ast.parse(path.read_text()) for path in sorted((runs.ROOT / "fedjax_bn").rglob("*.py"))
}
ALLOWED = {"os._exit"}  # documented


def private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def reached_into(tree: ast.AST) -> list[str]:
    """Private modules, names and attributes of other packages that a module uses."""
    nodes, foreign, found = list(ast.walk(tree)), {}, []
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
        else:
            continue
        others = [(name, of) for name, of in names if of.split(".")[0] != "fedjax_bn"]
        foreign |= {name: of if name in of else name for name, of in others}
        found += [of for _, of in others if private(of)]
    for node in nodes:
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in foreign and private(rest):
                found.append(f"{root}.{rest}")
    return sorted(set(found) - ALLOWED)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from jax._src import distributed", "jax._src.distributed"),
        ("import jax._src.core", "jax._src.core"),
        ("import pickle\nclass A(pickle._Unpickler): ...", "pickle._Unpickler"),
        ("from flax import nnx as n\nn.Module._x", "n.Module._x"),
        ("from __future__ import annotations\nimport os\nos._exit(os.__doc__)", ""),
        ("from fedjax_bn import a\na._b", ""),
    ],
)
def test_what_reaches_into_another_package_is_found(text, found):
    assert reached_into(ast.parse(text)) == [found] * bool(found)


def test_no_module_reaches_into_another_package():
    found = {str(path): reached_into(tree) for path, tree in SOURCES.items()}
    assert not {path: names for path, names in found.items() if names}


@cache
def calls() -> dict[str, list[tuple[Path, ast.Call]]]:
    """All calls, by the last part of the function's name."""
    found = defaultdict(list)
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                found[name].append((path, node))
    return found


def test_only_the_table_of_streams_picks_constants_for_keys():
    for path, call in calls()["fold_in"]:
        number = call.args[1]
        assert not isinstance(number, ast.Constant | ast.BinOp), path
        assert not ast.unparse(number).isupper(), path


def test_each_stream_of_keys_has_one_use():
    used = Counter(
        call.args[1].value for _, call in calls()["stream"] if len(call.args) == 2
        if isinstance(call.args[1], ast.Constant)
    )  # fmt: skip
    assert used == Counter(list(keys._STREAMS))


# Where texts of a configuration or an option are taken apart. A new module of another room asks
# `arguments`, which has `read_choice`, `split_choice`, `names_in` and `bounds_in`.
PARSING = {
    *("adaptation/choice.py", "data/division/clients.py", "data/division/forms.py"),
    "data/masks/values.py",
    *("flower/settings.py", "main.py", "report/finished_runs.py", "report/published.py"),
    *("training/evaluation/evaluate.py", "run/experiment/datasets.py", "run/experiment/method.py"),
    *("training/machine.py", "training/together.py", "training/population.py"),
}


def test_texts_are_taken_apart_in_the_rooms_of_arguments_and_configuration():
    found = set()
    for name in ("split", "rsplit", "partition", "rpartition"):
        for path, call in calls()[name]:
            by = call.args[0] if call.args else None
            of = getattr(call.func, "value", call.func)
            separates = isinstance(by, ast.Constant) and set(str(by.value)) & set(":=,")
            if separates and ast.unparse(of) != "re":
                found.add(path.relative_to(runs.ROOT / "fedjax_bn").as_posix())
    others = {p for p in found if not p.startswith(("arguments/", "run/config/"))}
    assert others == PARSING
