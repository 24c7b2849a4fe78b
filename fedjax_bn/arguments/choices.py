"""Choices with arguments in one word: `name:key=value:key=value`, such as `ResNet18:width=16`.

The keys are the arguments of the function of that name, of its signature's types.
`package.module:function:key=value` chooses a user's own function or class.
"""

import ast
import functools
import importlib
import inspect
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

from fedjax_bn.arguments.ranges import BY_KIND, Range, stated_range
from fedjax_bn.arguments.text import brief, nearest, one_line

Table = Mapping[str, Callable[..., Any]]
_PLAIN = (bool, int, float, str)  # types whose values can be written in a word
REQUIRED = inspect.Parameter.empty
# A function that returns why a word may not choose the code `module:name`; "" if it may.
_REFUSED: ContextVar[Callable[[str], str]] = ContextVar("refused", default=lambda name: "")


class Argument(NamedTuple):
    """An argument of a function, or a key of the configuration."""

    kind: type  # the type of its values: bool, int, float, str, or a tuple of texts
    default: Any  # `REQUIRED` if it has no default; if the default is None, None is allowed too
    range: Range = BY_KIND[bool]  # the allowed values of this type
    meaning: str = ""  # what it is for, of keys of the configuration
    is_choice: bool = False  # whether its value may be a choice with arguments of its own

    def refusal(self, value: Any) -> str:
        """Returns why a value is not allowed, such as "must be ..."; "" if it is."""
        if value is None and self.default is None:
            return ""
        if type(value) is self.kind:
            return self.range.refusal(value)
        name = "a tuple of names" if self.kind is tuple else self.kind.__name__
        return f"is of type {type(value).__name__}, but it must be {name}"


def read_choice(
    what: str,
    text: str,
    table: Table,
    *,
    given: Collection[str] = (),
    extra: Mapping[str, Argument] | None = None,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the function that a word `name:key=value:...` chooses, and the arguments in it.

    The word cannot set the arguments that are `given` by the caller; `extra` are further keys.
    `what` begins a ValueError: an unknown name, module or key, or a value that is not allowed.
    """
    name, changes = split_choice(text, table)
    function = table[name] if name in table else _imported(what, name, table)
    settable = plain_arguments(function, given) | dict(extra or {})
    chosen: dict[str, Any] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        before = next(reversed(chosen), "")
        is_text = bool(before) and settable[before].range is BY_KIND[str]
        if key not in settable and is_text and (settable[before].is_choice or not equals):
            # A choice with arguments, `mixing=uniform:low=0`, or a path such as `trace=C:/file`.
            chosen[before] += f":{change}"
            continue
        if key not in settable or not equals:
            hint = f": write {key}=VALUE" if key in settable else nearest(key, settable)
            raise ValueError(f"{what}: {brief(change)} must be key=value of an option{hint}")
        chosen[key] = parsed(value, settable[key].kind)
        if problem := settable[key].refusal(chosen[key]):
            raise ValueError(f"{what}: {key}={brief(chosen[key])} {problem}")
    for key, argument in settable.items():
        if argument.default is REQUIRED and key not in chosen:
            raise ValueError(f"{what}: {name} needs {key}: write {name}:{key}=VALUE")
    return function, chosen


def split_choice(word: str, table: Collection[str]) -> tuple[str, list[str]]:
    """Returns the name and the changes of a word; a name outside the table may have a colon."""
    name, *changes = word.split(":")
    if name not in table and changes and "=" not in changes[0]:
        name = f"{name}:{changes.pop(0)}"
    return name, changes


def parsed(text: str, kind: type = object) -> Any:
    """Returns a text, without quotes, as a value of type `kind`, or of another if it must."""
    if kind is float:
        with suppress(ValueError):
            return float(text)
    # A name or a path is no literal and stays a text; so does what looks like code.
    value: Any = text
    with suppress(ValueError, TypeError, SyntaxError), warnings.catch_warnings(action="ignore"):
        value = ast.literal_eval(text)  # which warns of "1or 2"
    if kind is str:
        return value if isinstance(value, str) else text
    if kind is tuple and isinstance(value, str):
        return tuple(filter(None, map(str.strip, value.split(","))))
    if kind is tuple and isinstance(value, tuple | list):
        return tuple(entry if isinstance(entry, str) else brief(entry) for entry in value)
    return value


def plain_arguments(
    function: Callable[..., Any], given: Collection[str] = ()
) -> dict[str, Argument]:
    """Returns the arguments of a function that a word can set, but those `given` by its caller."""
    signature = _signature(function)
    arguments: dict[str, Argument] = {}
    for key, parameter in signature.parameters.items():
        # A function that passes `**fields` to the class it returns has the class's arguments too.
        if parameter.kind is parameter.VAR_KEYWORD and inspect.isclass(signature.return_annotation):
            arguments = plain_arguments(signature.return_annotation, given) | arguments
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            kind, default = _kind(parameter), parameter.default
            if kind and key not in given:
                allowed = stated_range(parameter.annotation) or BY_KIND[kind]
                if kind is float and type(default) is int:
                    default = float(default)
                options = {*typing.get_args(parameter.annotation)}
                is_choice = str in options and bool(options - {*_PLAIN, type(None)})
                arguments[key] = Argument(kind, default, allowed, is_choice=is_choice)
    return arguments


def _kind(parameter: inspect.Parameter) -> type | None:
    """Returns the plain type of an argument, from its default or else from its annotation."""
    default, annotation = parameter.default, parameter.annotation
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    options = [getattr(option, "__origin__", option) for option in members]  # of Annotated
    if type(default) is tuple and stated_range(annotation):  # other tuples cannot be set
        return tuple
    if type(default) in _PLAIN:  # `x: float = 1` is a float
        return float if type(default) is int and float in options else type(default)
    plain = [kind for kind in _PLAIN if kind in options]
    empty = default is None or default is REQUIRED
    return plain[0] if empty and len(plain) == 1 else None


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    made_by_metaclass = inspect.isclass(function) and type(function).__call__ is not type.__call__
    if made_by_metaclass and "__init__" in vars(function):
        # A metaclass with its own `__call__`, such as nnx's, hides the arguments of `__init__`.
        function = functools.partial(vars(function)["__init__"], None)
    try:
        return inspect.signature(function, eval_str=True)
    except (AttributeError, NameError, TypeError):  # annotations that only type checkers resolve
        return inspect.signature(function)


def _imported(what: str, name: str, table: Table) -> Callable[..., Any]:
    """Returns a user's own function or class, `package.module:function`."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{what} is unknown{nearest(name, table)}, or package.module:name")
    if refusal := _REFUSED.get()(name):
        raise ValueError(f"{what} names the code {brief(name)}, which is not imported: {refusal}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever a user's own module may raise
        reason = f"cannot be imported ({type(error).__name__}: {one_line(error)})"
        raise ValueError(f"{what}: {name} {reason}: install it, or start in its folder") from error


@contextmanager
def imports_refused(why: Callable[[str], str]) -> Iterator[None]:
    """Keeps choices of another person's files from importing code, unless `why(name)` is ""."""
    before = _REFUSED.set(why)
    try:
        yield
    finally:
        _REFUSED.reset(before)


def call_chosen(what: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Calls a chosen function; ValueError if the arguments do not fit, or a user's own fails."""
    # Bound before the call: a TypeError inside our own function is a fault of ours.
    with naming(what):
        _signature(function).bind(*given, **options)
    is_packaged = str(getattr(function, "__module__", "")).startswith("fedjax_bn.")
    with nullcontext() if is_packaged else naming(what):
        return function(*given, **options)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turns any error of a user's own code into a ValueError that names the code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and "\n" not in str(error):  # it is taken for ours
            raise
        raise ValueError(f"{what} fails ({type(error).__name__}: {one_line(error)})") from error
