"""The keys under methods' names, such as `fedprox.mu`, from the methods' own signatures.

The signatures are read from the files of `methods` and `rivals` without importing them: that would
import JAX, and a mistake in a configuration is to be answered at once.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from fedjax_bn.engine import ranges
from fedjax_bn.engine.ranges import Range, stated_range

# Arguments that the configuration gives by keys of its own, or that another method stands for.
_ELSEWHERE = ("clients", "keep_optimizer", "local_epochs", "adapter")
PACKAGE = Path(__file__).parents[2]


class MethodArgument(NamedTuple):
    """An argument of a method: its default, the docstring's words, its range if it states one."""

    default: bool | int | float | str
    meaning: str
    range: Range | None


def method_arguments() -> dict[str, MethodArgument]:
    """`METHOD.ARGUMENT` of every keyword argument whose default is a bool, a number or a text."""
    found = {}
    for method in _methods():
        meanings = _meanings(ast.get_docstring(method) or "")
        arguments = method.args
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            value = _plain(default)
            if value is None or argument.arg in _ELSEWHERE:
                continue
            annotation = _annotation(argument)
            if float in (annotation, *get_args(annotation)):
                value = float(value)
            found[f"{method.name}.{argument.arg}"] = MethodArgument(
                value, meanings.get(argument.arg, ""), stated_range(annotation)
            )
    return dict(sorted(found.items()))


def _methods() -> Iterator[ast.FunctionDef]:
    """The public functions of the folder that return a `FederatedMethod`."""
    for file in sorted([*PACKAGE.glob("methods/*.py"), *PACKAGE.glob("rivals/*.py")]):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            if isinstance(node.returns, ast.Name) and node.returns.id == "FederatedMethod":
                yield node


def _annotation(argument: ast.arg) -> Any:
    """The type of an argument: `float`, or one of `fedjax_bn.engine.ranges` by its name; else
    None."""
    names = [part.id for part in ast.walk(argument.annotation or argument) if _is_name(part)]
    if "float" in names[:1]:
        return float
    return next((getattr(ranges, name) for name in names if hasattr(ranges, name)), None)


def _is_name(part: ast.AST) -> bool:
    return isinstance(part, ast.Name)


def _plain(default: ast.expr | None) -> bool | int | float | str | None:
    try:
        value = ast.literal_eval(default) if default else None
    except ValueError:  # an expression
        return None
    return value if isinstance(value, bool | int | float | str) else None


def _meanings(docstring: str) -> dict[str, str]:
    """What the section `Args:` of a docstring says of each argument, in one line."""
    section = re.search(r"^Args:\n((?:  .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    parts = re.split(r"^  (?=\S)", section[1] if section else "", flags=re.MULTILINE)
    pairs = (part.split(":", 1) for part in parts if ":" in part)
    return {name: " ".join(text.split()) for name, text in pairs}
