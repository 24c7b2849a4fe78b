"""Lists for `fedjax-bn list`: what can be named, and the options of one name."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedjax_bn.arguments.choices import REQUIRED, Argument, plain_arguments
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.ranges import BY_KIND
from fedjax_bn.arguments.text import brief, nearest
from fedjax_bn.run.config.defaults import keys
from fedjax_bn.run.config.file import packaged_configs

_CHOICES = ("methods", "models", "datasets", "adaptations", "weights", "augmentations")
LISTS = (*_CHOICES, "configs", "keys")


def listing(names: Sequence[str]) -> str:
    """Returns what `fedjax-bn list KIND` and `fedjax-bn list KIND NAME` print, in columns.

    Raises:
      ConfigError: there is no such list or name.
    """
    kind, *chosen = names or ("",)
    if kind not in LISTS:
        raise ConfigError(f"list {brief(kind)} is unknown{nearest(kind, LISTS)}")
    if kind == "keys":
        table: Mapping[str, Any] = keys()
    elif kind == "configs":
        table = {name: file.read_text().strip('"') for name, file in packaged_configs().items()}
    else:
        table = _choices_of(kind)
    for name in chosen:
        if name not in table:
            raise ConfigError(f"{kind} has no {brief(name)}{nearest(name, table)}")
        if kind in _CHOICES:
            return _options(kind, name, table[name])
    return _columns([_row(kind, name, table[name]) for name in chosen or table])


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _row(kind: str, name: str, value: Any) -> Sequence[str]:
    """Returns a name, its first line, and the names of its options; of a key all there is."""
    if kind == "keys":
        return name, _default(value), _type(value), value.meaning
    if kind == "configs":
        return name, _first_line(value)
    options = "".join(f":{key}" for key in _arguments_of(kind, name, value))
    return name, _first_line(inspect.getdoc(value)), options


def _choices_of(kind: str) -> Mapping[str, Callable[..., Any]]:
    """Returns name -> function; imports it here, because most need JAX."""
    from fedjax_bn.adaptation.choice import ADAPTATIONS
    from fedjax_bn.run.experiment import datasets, method, task

    tables: tuple[Mapping[str, Callable[..., Any]], ...] = (
        method.METHODS,
        task.MODELS,
        datasets.DATASETS,
        ADAPTATIONS,
        method.WEIGHING,
        task.AUGMENTATIONS,
    )
    return dict(zip(_CHOICES, tables, strict=True))[kind]


def _arguments_of(kind: str, name: str, function: Callable[..., Any]) -> dict[str, Argument]:
    """Returns the options of a name in a list."""
    from fedjax_bn.adaptation.choice import STREAM
    from fedjax_bn.run.experiment import method, task

    if kind == "methods":
        return method.method_options(name)
    set_by_caller = {"models": task.OF_CALLER, "datasets": ("config",), "augmentations": ("size",)}
    options = plain_arguments(function, set_by_caller.get(kind, ()))
    return options | (STREAM if kind == "adaptations" else {})


def _options(kind: str, name: str, function: Callable[..., Any]) -> str:
    """Returns the docstring's first line of a name, and a line for each option."""
    meanings = _meanings(function)
    if kind == "methods":  # a variant such as `fediga` has the options of its family, `fedig`
        module = inspect.getmodule(function)
        meanings = _meanings(getattr(module, module.__name__.rpartition(".")[2], None)) | meanings
    rows = [
        (f":{key}={_default(option)}", _type(option), option.meaning or meanings.get(key, ""))
        for key, option in _arguments_of(kind, name, function).items()
    ]
    options = _columns(rows) if rows else "It has no options."
    return f"{name}: {_first_line(inspect.getdoc(function))}\n\n{options}"


def _meanings(function: Callable[..., Any] | None) -> dict[str, str]:
    """Returns argument -> its text in `Args:` or `Attributes:` of a docstring, on one line."""
    docstring = f"{inspect.getdoc(function) or ''}\n"
    meanings = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:  .*\n|\n)*)", docstring, re.MULTILINE):
        for part in re.split(r"^  (?=\S)", section, flags=re.MULTILINE):
            names, _, meaning = part.partition(":")
            meanings |= {name.strip(): " ".join(meaning.split()) for name in names.split(",")}
    return meanings


def _default(argument: Argument) -> str:
    """Returns the default as text; "..." if a value must be given."""
    if argument.default is REQUIRED:
        return "..."
    if argument.kind is tuple:
        return ",".join(argument.default)
    return "" if argument.default is None else str(argument.default)


def _type(argument: Argument) -> str:
    """Returns the type of an argument, with its range unless that is the usual one."""
    if argument.range.names:
        return argument.range.text
    kind = {tuple: "texts", str: "text"}.get(argument.kind, argument.kind.__name__)
    return kind if argument.range in BY_KIND.values() else f"{kind} {argument.range.text}"


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0].strip('"').removesuffix(".")
