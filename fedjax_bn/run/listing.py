"""Lists for `fedjax-bn list`: a line for each method, model, dataset, adaptation, config or key."""

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

_Line = tuple[str, ...]
LISTS = ("methods", "models", "datasets", "adaptations", "configs", "keys")


def listing(names: Sequence[str]) -> str:
    """Returns what `fedjax-bn list NAME` prints, in columns.

    Raises:
      ConfigError: there is no such list, or not exactly one name.
    """
    if not names:
        raise ConfigError(f"list what? One of {', '.join(LISTS)}")
    if len(names) > 1 or names[0] not in LISTS:
        raise ConfigError(
            f"list {brief(' '.join(names))} is unknown{nearest(' '.join(names), LISTS)}"
        )
    rows = list(_rows(names[0]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _rows(kind: str) -> Iterable[_Line]:
    """Yields the rows of a list; imports modules where they are read, because most need JAX."""
    if kind == "methods":
        from fedjax_bn.run.experiment.method import METHODS, method_options

        for name, method in METHODS.items():
            yield name, _first_line(method), _arguments(method_options(name))
    elif kind == "models":
        from fedjax_bn.run.experiment.task import MODELS, OF_CALLER

        yield from _functions(MODELS, OF_CALLER)
    elif kind == "datasets":
        from fedjax_bn.run.experiment.datasets import describe_datasets

        yield from describe_datasets().items()
    elif kind == "adaptations":
        from fedjax_bn.adaptation.choice import ADAPTATIONS, STREAM

        yield from _functions(ADAPTATIONS)
        yield "", "and for each of these", _arguments(STREAM)
    elif kind == "configs":
        for name, file in packaged_configs().items():
            yield name, file.read_text().partition("\n")[0].strip('"').removesuffix(".")
    else:
        for name, key in keys().items():
            default = ",".join(key.default) if key.kind is tuple else key.default
            of = {tuple: "texts", str: "text"}.get(key.kind, key.kind.__name__)
            allowed = key.range.text if key.range.names else f"{of} {key.range.text}".strip()
            # Only the first sentence; the dot in "Eq. 3" does not end it.
            sentence = re.split(r"(?<!Eq)\. ", key.meaning, maxsplit=1)[0].removesuffix(".")
            yield name, "" if default is None else str(default), allowed, sentence


def _functions(
    table: Mapping[str, Callable[..., Any]], given: Sequence[str] = ()
) -> Iterable[_Line]:
    """Yields (name, first line of the docstring, `:key=default` of the arguments)."""
    for name, function in table.items():
        yield name, _first_line(function), _arguments(plain_arguments(function, given))


def _arguments(options: Mapping[str, Argument]) -> str:
    """Returns `:key=default` for each argument, with its range unless that is the usual one."""
    texts = []
    for key, (_, default, allowed, _) in options.items():
        value = "..." if default is REQUIRED or default is None else default
        usual = allowed in BY_KIND.values()
        texts.append(f":{key}={value}" + ("" if usual else f" ({allowed.text}) "))
    return "".join(texts)


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0].removesuffix(".")
