"""Lists for `fedjax-bn list`: what can be named, and the options of one name."""

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedjax_bn.arguments.choices import REQUIRED, Argument, plain_arguments
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.ranges import BY_KIND
from fedjax_bn.arguments.text import brief, nearest
from fedjax_bn.run.config.choices import CLOSED
from fedjax_bn.run.config.defaults import KEYS
from fedjax_bn.run.config.file import packaged_configs

_CHOICES = (
    *("methods", "models", "datasets", "adaptations", "weights", "augmentations", "tasks"),
    *CLOSED,
)
_OF_CALLER = ("config", "size", "draw", "at", "classes")  # arguments that no option sets
LISTS = (*_CHOICES, "configs", "keys")


def listing(names: Sequence[str]) -> str:
    """Returns what `fedjax-bn list KIND` and `fedjax-bn list KIND NAME` print; or a ConfigError."""
    kind, *chosen = names or ("",)
    if kind not in LISTS:
        raise ConfigError(f"list {brief(kind)} is unknown{nearest(kind, LISTS)}")
    table = _table(kind)
    if unknown := next((name for name in chosen if name not in table), None):
        raise ConfigError(f"{kind} has no {brief(unknown)}{nearest(unknown, table)}")
    if chosen and kind in _CHOICES:
        return _options(kind, chosen[0], table[chosen[0]])
    entries = []
    for name in chosen or table:
        if kind == "keys":
            entries.append(_described(name, table[name], table[name].meaning))
        elif kind == "configs":
            entries.append(_wrapped(name, _first_line(table[name].read_text())))
        else:
            title = ":".join((name, *_arguments_of(kind, name, table[name])))
            entries.append(_wrapped(title, _first_line(inspect.getdoc(table[name]))))
    return "\n".join(entries)


def _table(kind: str) -> Mapping[str, Any]:
    if kind in ("keys", "configs"):
        return KEYS if kind == "keys" else packaged_configs()
    from fedjax_bn.adaptation.choice import ADAPTATIONS  # most need JAX
    from fedjax_bn.run.experiment import datasets, method, model

    return {
        "methods": method.METHODS,
        "models": model.MODELS,
        "datasets": datasets.DATASETS,
        "adaptations": ADAPTATIONS,
        "weights": method.WEIGHING,
        "augmentations": model.AUGMENTATIONS,
        "tasks": model.TASKS,
        **CLOSED,
    }[kind]


def _described(name: str, argument: Argument, meaning: str) -> str:
    """Returns `name=default  (type)` of an option or key, with its meaning below."""
    default = "" if argument.default is None else argument.default
    text = ",".join(default) if argument.kind is tuple else str(default)
    text = "..." if default is REQUIRED else text
    return _wrapped(f"{name}={text}  ({_type(argument)})", meaning)


def _wrapped(title: str, meaning: str) -> str:
    # A name such as `package.module:function` stays whole, to be copied.
    wrapped = textwrap.wrap(meaning, 76, break_on_hyphens=False, break_long_words=False)
    return "\n    ".join((title, *wrapped))


def _arguments_of(kind: str, name: str, function: Callable[..., Any]) -> dict[str, Argument]:
    """Returns the options of a name in a list."""
    from fedjax_bn.adaptation.choice import STREAM
    from fedjax_bn.run.experiment import method, model

    if kind == "methods":
        return method.method_options(name)
    options = plain_arguments(function, {"models": model.OF_CALLER}.get(kind, _OF_CALLER))
    return options | (STREAM if kind == "adaptations" else {})


def _options(kind: str, name: str, function: Callable[..., Any]) -> str:
    """Returns the docstring's first line of a name, and a paragraph for each option."""
    meanings = _meanings(function)
    if kind == "methods":  # a variant such as `fediga` has the options of its family, `fedig`
        module = inspect.getmodule(function)
        meanings = _meanings(getattr(module, module.__name__.rpartition(".")[2], None)) | meanings
    options = _arguments_of(kind, name, function)
    texts = [_described(f":{key}", options[key], meanings.get(key, "")) for key in options]
    title = f"{name}: {_first_line(inspect.getdoc(function))}\n"
    return "\n".join((title, *(texts or ["It has no options."])))


def _meanings(function: Callable[..., Any] | None) -> dict[str, str]:
    """Returns argument -> its text in `Args:` or `Attributes:` of a docstring, on one line."""
    docstring = f"{inspect.getdoc(function) or ''}\n"
    meanings = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:  .*\n|\n)*)", docstring, re.MULTILINE):
        for part in re.split(r"^  (?=\S)", section, flags=re.MULTILINE):
            names, _, meaning = part.partition(":")
            meanings |= {name.strip(): " ".join(meaning.split()) for name in names.split(",")}
    return meanings


def _type(argument: Argument) -> str:
    """Returns the type of an argument, with its range unless that is the usual one."""
    kind, allowed = argument.kind, argument.range
    if allowed.names:
        return allowed.text
    name = {tuple: "names", str: "text"}.get(kind, kind.__name__)
    if allowed in BY_KIND.values():
        return name
    return f"{name} {allowed.text}" if kind in (int, float) else allowed.text


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0].strip('"').removesuffix(".")
