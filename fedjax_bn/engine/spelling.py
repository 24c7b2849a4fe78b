"""Choices with arguments in one word: `name:key=value:key=value`, such as `ResNet18:width=16`.

The keys are the arguments of the function that the name stands for, with the types that its
signature gives them. `package.module:function:key=value` chooses a user's own function or class.
"""

import ast
import functools
import importlib
import inspect
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

from fedjax_bn.engine.ranges import ANY, BY_KIND, Range, brief, nearest, refusal, stated_range

Table = Mapping[str, Callable[..., Any]]
PLAIN = (bool, int, float, str)  # types that a word can spell
# Why a word may not choose the code `module:name`; "" where it may.
_REFUSED: ContextVar[Callable[[str], str]] = ContextVar("refused", default=lambda name: "")


class Argument(NamedTuple):
    """An argument that a word can spell.

    Attributes:
      kind: its type.
      default: `REQUIRED` where there is none.
      range: what values are allowed.
    """

    kind: type
    default: Any
    range: Range = ANY


REQUIRED = inspect.Parameter.empty


def read_choice(
    what: str,
    text: str,
    table: Table,
    *,
    given: Collection[str] = (),
    extra: Mapping[str, Argument] | None = None,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that a word chooses, and the arguments that it spells.

    Args:
      what: what the word is, with the word, for error messages.
      text: the word, `name:key=value:...` or `package.module:function:key=value:...`.
      table: the functions that have a name of their own.
      given: arguments that the caller gives, which the word cannot spell.
      extra: further keys, that are not arguments of the function.

    Raises:
      ValueError: an unknown name, module or key, a value of another type or out of its range, or
        one that is missing.
    """
    name, changes = split_choice(text, table)
    function = table[name] if name in table else _imported(what, name, table)
    try:
        known = plain_arguments(function, given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: its arguments cannot be read ({one_line(error)})") from error
    known |= extra or {}
    if changes and not known:
        raise ValueError(f"{what}: {name} takes no arguments")
    chosen = dict(_change(what, change, known) for change in changes)
    for key, argument in known.items():
        if argument.default is REQUIRED and key not in chosen:
            raise ValueError(f"{what}: {name} needs {key}: write {name}:{key}=VALUE")
    return function, chosen


@contextmanager
def imports_refused(why: Callable[[str], str]) -> Iterator[None]:
    """A context in which words that were read from someone's files import no code of theirs.

    Args:
      why: `why("module:name")` ends the sentence that refuses it; "" allows the import.
    """
    before = _REFUSED.set(why)
    try:
        yield
    finally:
        _REFUSED.reset(before)


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
    found: dict[str, Argument] = {}
    for key, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and inspect.isclass(signature.return_annotation):
            found = plain_arguments(signature.return_annotation, given) | found
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            kind = _kind(parameter)
            if kind and key not in given:
                allowed = stated_range(parameter.annotation) or BY_KIND.get(kind, ANY)
                found[key] = Argument(kind, parameter.default, allowed)
    return found


def call_chosen(what: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """`function(*given, **options)` of what a word chose, perhaps a user's own.

    Raises:
      ValueError: its signature does not take these, or a user's own function fails; and what a
        function of ours raises.
    """
    try:
        _signature(function).bind(*given, **options)
    except (TypeError, ValueError) as error:
        call = ", ".join([*(type(x).__name__ for x in given), *(f"{key}=..." for key in options)])
        raise ValueError(f"{what}: {error}; it is called with ({call})") from error
    with naming(what) if _is_own(function) else nullcontext():
        return function(*given, **options)


def _is_own(function: Callable[..., Any]) -> bool:
    """Whether a function is a user's own, or at any rate none of ours."""
    return not str(getattr(function, "__module__", "")).startswith("fedjax_bn.")


def literal(spelled: str) -> Any:
    """The value that a text spells, or the text."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of "1or 2"
            return ast.literal_eval(spelled)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # of deep nesting
        return spelled


def as_float(number: float | str) -> float:
    """The float that is a number or a text; infinity for one of hundreds of digits.

    Raises:
      ValueError: the text spells none.
    """
    try:
        return float(number)
    except OverflowError:
        return float("inf")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """A context in which whatever a user's own code raises becomes a ValueError that names it.

    A ValueError of one line passes: it is ours.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and "\n" not in str(error):
            raise
        raise ValueError(f"{what} fails ({type(error).__name__}: {one_line(error)})") from error


def one_line(error: BaseException) -> str:
    """What an error says, in one line, and not all of a long one."""
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else f"{text[:480]}..."


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    made_by_metaclass = inspect.isclass(function) and type(function).__call__ is not type.__call__
    if made_by_metaclass and "__init__" in vars(function):
        # A metaclass that makes the objects, as nnx's does, hides the arguments of `__init__`.
        function = functools.partial(vars(function)["__init__"], None)
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
    given = typing.get_args(annotation) if union else (annotation,)
    options = [getattr(option, "__origin__", option) for option in given]  # of Annotated
    plain = [kind for kind in PLAIN if kind in options]
    return plain[0] if len(plain) == 1 else None


def _imported(what: str, name: str, table: Table) -> Callable[..., Any]:
    """A user's own function or class, `package.module:function`."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"{what} is unknown{nearest(name, table)}, or your own as package.module:name"
        )
    if why := _REFUSED.get()(name):
        raise ValueError(f"{what} names the code {brief(name)}, which is not imported: {why}")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's own module may raise
        reason = one_line(error)
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
            f"{what}: {brief(change)} must be key=value with a key of {', '.join(sorted(known))}"
        )
    kind, default, allowed = known[key]
    value = spelled if kind is str else literal(spelled)
    if kind is float and type(value) is int:
        value = as_float(value)
    if type(value) is not kind:
        such = f", such as {default!r}" if type(default) is kind else ""
        raise ValueError(f"{what}: {key} must be of type {kind.__name__}{such}")
    if why := refusal(value, allowed):
        raise ValueError(f"{what}: {key}={brief(value)} {why}")
    return key, value
