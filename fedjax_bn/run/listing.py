"""Lists for `fedjax-bn list`: what can be named, and the options of one name."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedjax_bn.arguments.choices import REQUIRED, Argument, plain_arguments
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.ranges import BY_KIND
from fedjax_bn.arguments.text import brief, nearest
from fedjax_bn.run.config.defaults import keys
from fedjax_bn.run.config.file import packaged_configs

LISTS = (
    *(
        "methods",
        "models",
        "datasets",
        "adaptations",
        "weights",
        "augmentations",
        "configs",
        "keys",
    ),
)


def listing(names: Sequence[str]) -> str:
    """Returns what `fedjax-bn list KIND` and `fedjax-bn list KIND NAME` print, in columns.

    Raises:
      ConfigError: there is no such list or name.
    """
    if not names:
        raise ConfigError(f"list what? One of {', '.join(LISTS)}")
    kind, *chosen = names
    if kind not in LISTS or len(chosen) > 1:
        raise ConfigError(f"list {brief(' '.join(names))} is unknown{nearest(kind, LISTS)}")
    if not chosen:
        return _columns(_rows(kind))
    table = _table(kind)
    name = chosen[0]
    if name not in table:
        raise ConfigError(f"{kind} has no {brief(name)}{nearest(name, table)}")
    if kind == "keys":
        return _columns([_key_row(name, keys()[name])])
    return _options(kind, name, table[name])


def _columns(rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _rows(kind: str) -> Iterable[Sequence[str]]:
    """Yields the rows of a list: a name, its first line, and the names of its options."""
    table = _table(kind)
    if kind == "keys":
        yield from (_key_row(name, key) for name, key in table.items())
    elif kind in ("datasets", "configs"):
        yield from table.items() if kind == "configs" else _described_datasets()
    else:
        for name, function in table.items():
            options = _arguments_of(kind, name, function)
            yield name, _first_line(function), "".join(f":{key}" for key in options)


def _table(kind: str) -> Mapping[str, Any]:
    """Returns name -> function of a list; imports it here, because most need JAX."""
    if kind == "configs":
        return {
            name: file.read_text().partition("\n")[0].strip('"').removesuffix(".")
            for name, file in packaged_configs().items()
        }
    if kind == "keys":
        return keys()
    from fedjax_bn.adaptation.choice import ADAPTATIONS
    from fedjax_bn.run.experiment import datasets, method, task

    tables: dict[str, Mapping[str, Any]] = {
        "methods": method.METHODS,
        "models": task.MODELS,
        "datasets": datasets.DATASETS,
        "adaptations": ADAPTATIONS,
        "weights": method.WEIGHING,
        "augmentations": task.AUGMENTATIONS,
    }
    return tables[kind]


def _described_datasets() -> Iterable[Sequence[str]]:
    from fedjax_bn.run.experiment.datasets import describe_datasets

    return describe_datasets().items()


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
    options, meanings = _arguments_of(kind, name, function), _meanings(function)
    if kind == "methods":  # a variant such as `fediga` has the options of its family, `fedig`
        meanings = _meanings(_family(function)) | meanings
    line = dict(_described_datasets())[name] if kind == "datasets" else _first_line(function)
    title = f"{name}: {line}"
    if not options:
        return f"{title}\n\nIt has no options."
    rows = [
        (f":{key}={_default(option)}", _type(option), option.meaning or meanings.get(key, ""))
        for key, option in options.items()
    ]
    return f"{title}\n\n{_columns(rows)}"


def _family(method: Callable[..., Any]) -> Callable[..., Any]:
    module = inspect.getmodule(method)
    return getattr(module, module.__name__.rpartition(".")[2], method) if module else method


def _meanings(function: Callable[..., Any]) -> dict[str, str]:
    """Returns argument -> its text in `Args:` or `Attributes:` of a docstring, on one line."""
    docstring = f"{inspect.getdoc(function) or ''}\n"
    meanings = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:  .*\n|\n)*)", docstring, re.MULTILINE):
        for part in re.split(r"^  (?=\S)", section, flags=re.MULTILINE):
            names, colon, meaning = part.partition(":")
            if colon:
                meanings |= {name.strip(): " ".join(meaning.split()) for name in names.split(",")}
    return meanings


def _key_row(name: str, key: Argument) -> Sequence[str]:
    return name, _default(key), _type(key), key.meaning


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


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0].removesuffix(".")
