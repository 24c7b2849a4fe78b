"""Lists for `fedjax-bn list`: a line for each method, model, dataset, adaptation, config or key."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedjax_bn.arguments.choices import REQUIRED, Argument, plain_arguments
from fedjax_bn.arguments.ranges import ANY, BY_KIND
from fedjax_bn.arguments.text import brief, nearest
from fedjax_bn.run.config.defaults import keys
from fedjax_bn.run.config.file import packaged_configs
from fedjax_bn.run.errors import ConfigError

Line = tuple[str, ...]


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
    rows = list(LISTS[names[0]]())
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _methods() -> Iterable[Line]:
    from fedjax_bn.run.experiment.method import METHODS, group_of

    for name, method in METHODS.items():
        own = [key for key in keys() if key.startswith(f"{group_of(name)}.")]
        yield name, _first_line(method), " ".join(own)


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
    for name, file in packaged_configs().items():
        yield name, file.read_text().partition("\n")[0].strip('"').removesuffix(".")


def _keys() -> Iterable[Line]:
    for name, key in keys().items():
        default = ",".join(key.default) if key.kind is tuple else key.default
        kind = {tuple: "texts", str: "text"}.get(key.kind, key.kind.__name__)
        allowed = key.range.text if key.range.names else f"{kind} {key.range.text}".strip()
        sentence = re.split(r"(?<!Eq)\. ", key.meaning, maxsplit=1)[0].removesuffix(".")
        yield name, "" if default is None else str(default), allowed, sentence


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
    """Name, first line of the docstring, and `:key=default` for the arguments in a word."""
    for name, function in table.items():
        yield name, _first_line(function), _arguments(plain_arguments(function, given))


def _arguments(options: Mapping[str, Argument]) -> str:
    """`:key=default` of each argument, with the range where it has one of its own."""
    texts = []
    for key, (_, default, allowed, _) in options.items():
        value = "..." if default is REQUIRED or default is None else default
        usual = allowed in (ANY, *BY_KIND.values())
        texts.append(f":{key}={value}" + ("" if usual else f" ({allowed.text}) "))
    return "".join(texts)


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0].removesuffix(".")
