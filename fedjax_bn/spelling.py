"""Choices with arguments in one word of a configuration: `name:key=value:key=value`."""

import ast
from typing import Any


def spelled_change(what: str, change: str, defaults: dict[str, Any]) -> tuple[str, Any]:
    """The key and the value of `key=value`, of the type of its default.

    Args:
      what: what the change belongs to, for the error message.
      change: the text.
      defaults: the valid keys, each with a value of its type.

    Raises:
      ValueError: no `=`, an unknown key, or a value of another type.
    """
    key, equals, spelled = change.partition("=")
    if key not in defaults or not equals:
        raise ValueError(
            f"{what}: {change!r} must be key=value with a key of {', '.join(sorted(defaults))}"
        )
    kind = type(defaults[key])
    try:
        value = spelled if kind is str else ast.literal_eval(spelled)
    except (ValueError, SyntaxError):
        value = spelled
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(
            f"{what}: {key} must be of type {kind.__name__}, such as {defaults[key]!r}"
        )
    return key, value
