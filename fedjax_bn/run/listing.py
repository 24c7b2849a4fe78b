"""What there is, for `fedjax-bn list`: a line for each, from the tables that choose."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.engine.ranges import ANY, BY_KIND, brief, nearest
from fedjax_bn.engine.spelling import REQUIRED, Argument, plain_arguments
from fedjax_bn.run.config.defaults import KEYS, Key
from fedjax_bn.run.config.file import packaged_configs
from fedjax_bn.run.errors import ConfigError

Line = tuple[str, ...]


def listing(names: Sequence[str]) -> str:
    """The lines of what `fedjax-bn list` was asked for.

    Raises:
      ConfigError: not exactly one thing was, or one that there is not.
    """
    if not names:
        raise ConfigError(f"list what? One of {', '.join(LISTS)}")
    if len(names) > 1 or names[0] not in LISTS:
        raise ConfigError(
            f"list {brief(' '.join(names))} is unknown{nearest(' '.join(names), LISTS)}"
        )
    return _grid(LISTS[names[0]]())


def _methods() -> Iterable[Line]:
    from fedjax_bn.run.experiment.method import METHODS, group_of

    for name, method in METHODS.items():
        group = group_of(name)
        keys = [key for key in KEYS if key.startswith(f"{group}.")]
        yield name, _first_line(method), " ".join(keys)


def _models() -> Iterable[Line]:
    from fedjax_bn.run.experiment.build import MODELS, OF_CALLER

    return _functions(MODELS, OF_CALLER)


def _adaptations() -> Iterable[Line]:
    from fedjax_bn.adaptation.choice import ADAPTATIONS, STREAM

    yield from _functions(ADAPTATIONS)
    yield "", "and for each of these", _arguments(STREAM)


def _datasets() -> Iterable[Line]:
    from fedjax_bn.run.experiment.readers import describe_datasets

    return describe_datasets().items()


def _configs() -> Iterable[Line]:
    return ((name, _title(file)) for name, file in packaged_configs().items())


def _keys() -> Iterable[Line]:
    return (
        (name, _spelled(key.default), _allowed(key), _sentence(key.meaning))
        for name, key in KEYS.items()
    )


LISTS: dict[str, Callable[[], Iterable[Line]]] = {
    "methods": _methods,
    "models": _models,
    "datasets": _datasets,
    "adaptations": _adaptations,
    "configs": _configs,
    "keys": _keys,
}


def _functions(
    table: Mapping[str, Callable[..., Any]], given: Sequence[str] = ()
) -> Iterable[Line]:
    """Name, first sentence of the docstring, and `:key=default` for what a word can spell."""
    for name, function in table.items():
        yield name, _first_line(function), _arguments(plain_arguments(function, given))


def _arguments(options: Mapping[str, Argument]) -> str:
    """`:key=default (range)` of each."""
    return "".join(
        f":{key}={_default(argument.default)}{_within(argument)}"
        for key, argument in options.items()
    )


def _within(argument: Argument) -> str:
    """The range of an argument, where it has one of its own."""
    usual = argument.range in (ANY, *BY_KIND.values())
    return "" if usual else f" ({argument.range.text}) "


def _default(value: Any) -> str:
    return "..." if value is REQUIRED or value is None else str(value)


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0].removesuffix(".")


def _sentence(text: str) -> str:
    """The first sentence of a text, without its full stop."""
    return re.split(r"(?<!Eq)\. ", text, maxsplit=1)[0].removesuffix(".")


def _title(file: Path) -> str:
    """The first line of a packaged config, which is its docstring's."""
    return file.read_text().partition("\n")[0].strip('"').removesuffix(".")


def _allowed(key: Key) -> str:
    kind = "texts" if key.kind is tuple else {str: "text"}.get(key.kind, key.kind.__name__)
    return f"{kind} {key.range.text}".strip() if not key.range.names else key.range.text


def _spelled(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else "" if value is None else str(value)


def _grid(lines: Iterable[Line]) -> str:
    """Columns, each as wide as its longest entry."""
    rows = [tuple(line) for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
