"""What sources must not do: reach into other packages, choose constants of keys."""

import ast
from collections import Counter

import runs
from fedjax_bn.engine import keys

SOURCES = {
    path: ast.parse(path.read_text()) for path in sorted((runs.ROOT / "fedjax_bn").rglob("*.py"))
}


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
    assert not {str(path): names for path, tree in SOURCES.items() if (names := reached_into(tree))}


def calls(name: str) -> list[ast.Call]:
    """All calls of functions of this name."""
    nodes = [node for tree in SOURCES.values() for node in ast.walk(tree)]
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
