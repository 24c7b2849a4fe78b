"""Choices with arguments in one word: `name:key=value:key=value`, such as `ResNet18:width=16`.

The keys are the arguments of the function that the name stands for, with the types that its
signature gives them. `package.module:function:key=value` chooses a user's own function or class.
"""

import ast
import difflib
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

Table = Mapping[str, Callable[..., Any]]
PLAIN = (bool, int, float, str)  # types that a word can spell


class Argument(NamedTuple):
    """An argument that a word can spell: its type, and its default (`REQUIRED`: there is none)."""

    kind: type
    default: Any


REQUIRED = inspect.Parameter.empty


def read_choice(
    what: str,
    text: str,
    table: Table,
    *,
    given: Collection[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that a word chooses, and the arguments that it spells.

    Args:
      what: what the word is, with the word, for error messages.
      text: the word, `name:key=value:...` or `package.module:function:key=value:...`.
      table: the functions that have a name of their own.
      given: arguments that the caller gives, which the word cannot spell.
      extra: further keys, each with a default, that are not arguments of the function.

    Raises:
      ValueError: an unknown name, module or key, a value of another type, or one that is missing.
    """
    name, changes = split_choice(text, table)
    function = table[name] if name in table else _imported(what, name, table)
    known = plain_arguments(function, given)
    known |= {key: Argument(type(value), value) for key, value in (extra or {}).items()}
    if changes and not known:
        raise ValueError(f"{what}: {name} takes no arguments")
    chosen = dict(_change(what, change, known) for change in changes)
    for key, argument in known.items():
        if argument.default is REQUIRED and key not in chosen:
            raise ValueError(f"{what}: {name} needs {key}: write {name}:{key}=VALUE")
    return function, chosen


def split_choice(text: str, table: Collection[str]) -> tuple[str, list[str]]:
    """The name and the changes of a word; a name that is not in the table has a colon inside."""
    name, *changes = text.split(":")
    if name not in table and changes and "=" not in changes[0]:
        name = f"{name}:{changes.pop(0)}"
    return name, changes


def plain_arguments(
    function: Callable[..., Any], given: Collection[str] = ()
) -> dict[str, Argument]:
    """The arguments of a function that a word can spell, but for those `given` by its caller.

    A function that hands `**fields` to the class it returns has the class's arguments too.
    """
    signature = _signature(function)
    found = {}
    for key, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and inspect.isclass(signature.return_annotation):
            found = plain_arguments(signature.return_annotation, given) | found
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            kind = _kind(parameter)
            if kind and key not in given:
                found[key] = Argument(kind, parameter.default)
    return found


def call_chosen(what: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """`function(*given, **options)` of what a word chose, perhaps a user's own.

    Raises:
      ValueError: its signature does not take these; and what the function itself raises.
    """
    try:
        _signature(function).bind(*given, **options)
    except TypeError as error:
        keys = "".join(f", {key}=..." for key in options)
        raise ValueError(
            f"{what}: {error}; it is called with ({', '.join(type(x).__name__ for x in given)}"
            f"{keys})"
        ) from error
    return function(*given, **options)


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: the likely meant name, and all valid ones."""
    valid = sorted(valid)
    lower = {option.lower(): option for option in valid}
    close = difflib.get_close_matches(name.lower(), lower, 1, 0.5)
    hint = f"; did you mean {lower[close[0]]!r}?" if close else ";"
    return f"{hint} valid are {', '.join(valid)}"


def literal(spelled: str) -> Any:
    """The value that a text spells, or the text."""
    try:
        return ast.literal_eval(spelled)
    except (ValueError, SyntaxError):
        return spelled


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    made_by_metaclass = inspect.isclass(function) and type(function).__call__ is not type.__call__
    if made_by_metaclass and "__init__" in vars(function):
        # A metaclass that makes the objects, as nnx's does, hides the arguments of `__init__`.
        function = functools.partial(function.__init__, None)
    try:
        return inspect.signature(function, eval_str=True)
    except (AttributeError, NameError, TypeError):  # annotations that only type checkers resolve
        return inspect.signature(function)


def _kind(parameter: inspect.Parameter) -> type | None:
    """The plain type of an argument, from its default or else from its annotation."""
    if type(parameter.default) in PLAIN:
        return type(parameter.default)
    if parameter.default is not None and parameter.default is not REQUIRED:
        return None
    annotation = parameter.annotation
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if union else (annotation,)
    plain = [kind for kind in PLAIN if kind in options]
    return plain[0] if len(plain) == 1 else None


def _imported(what: str, name: str, table: Table) -> Callable[..., Any]:
    """A user's own function or class, `package.module:function`."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"{what} is unknown{nearest(name, table)}, or your own as package.module:name"
        )
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever a user's own module may raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{what}: module {module!r} cannot be imported ({type(error).__name__}: {reason}); it "
            "must lie in the current folder or be installed"
        ) from error
    function = getattr(found, attribute, None)
    if not callable(function):
        own = [key for key, value in vars(found).items() if _defined_in(module, key, value)]
        raise ValueError(
            f"{what}: module {module!r} has no function or class {attribute!r}"
            f"{nearest(attribute, own)}"
        )
    return function


def _defined_in(module: str, name: str, value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", "") == module and name[0] != "_"


def _change(what: str, change: str, known: Mapping[str, Argument]) -> tuple[str, Any]:
    """The key and the value of `key=value`, of the type of the argument."""
    key, equals, spelled = change.partition("=")
    if key not in known or not equals:
        raise ValueError(
            f"{what}: {change!r} must be key=value with a key of {', '.join(sorted(known))}"
        )
    kind, default = known[key]
    value = spelled if kind is str else literal(spelled)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        such = f", such as {default!r}" if type(default) is kind else ""
        raise ValueError(f"{what}: {key} must be of type {kind.__name__}{such}")
    return key, value
