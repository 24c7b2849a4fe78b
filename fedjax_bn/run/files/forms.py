"""The forms of a run's JSON files, which refuse edited or damaged ones with an error message.

A form is a kind (a word for it, and a test), a list of one form, or a dict from key to form. A key
that ends with "?" may be missing; "*" means any further names.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

Form = Any  # a _Kind, a list of one form, a dict of forms


class _Kind(NamedTuple):
    """What a single value must be."""

    word: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    """Whether it is a float, NaN (of a client without samples) included, or an int of 64 bits."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


_ANY = _Kind("anything", lambda value: True)
TEXT = _Kind("text", lambda value: type(value) is str)
NUMBER = _Kind("a number", _is_number)
_FLAG = _Kind("true or false", lambda value: type(value) is bool)
_OR_NOTHING = _Kind("a number or null", lambda value: value is None or _is_number(value))
_COUNT = _Kind("a whole number above 0", lambda value: _is_whole(value) and value > 0)
_INDEX = _Kind("a whole number", _is_whole)
_ACCURACY = {"mean": NUMBER, "*": NUMBER}
_UNSEEN = {"*": {"*": NUMBER}}
_MEASURES = {"*": {"*": _OR_NOTHING}}  # of internal clients
_UNSEEN_MEASURES = {"*": _MEASURES}
_BOTH = {"internal": _ACCURACY, "unseen": _UNSEEN}
OBJECT = {"*": _ANY}

CLAIM = {
    "config": OBJECT,
    "data": TEXT,
    "notes?": [TEXT],
    "versions?": {"*": TEXT},
    "devices?": [TEXT],
    "machine?": OBJECT,
    "started_in?": TEXT,
    "*": _ANY,
}
FINISHED = CLAIM | {
    "form": {
        "dataset": TEXT,
        "clients": [TEXT],
        "num_classes": _COUNT,
        "shape": [_COUNT],
        "dtype": TEXT,
        "mean": [NUMBER],
        "std": [NUMBER],
        "classes?": [TEXT],
        "boxes?": _COUNT,
    }
}
SUMMARY = {
    "method": TEXT,
    "dataset": TEXT,
    "seed": NUMBER,
    "rounds": _COUNT,
    "selected_round": _COUNT,
    "accuracy": _BOTH,
    "last_round": _BOTH,
    "seconds_per_round": NUMBER,
    "compile_seconds": NUMBER,
    "samples_per_second": NUMBER,
    "score?": TEXT,
    "measures?": {"internal": _MEASURES, "unseen": _UNSEEN_MEASURES},
    "traffic?": {"*": NUMBER},
    "*": _ANY,
}
_SPLIT = {"samples": _INDEX, "classes": [_INDEX]}
DATA = {
    "classes": [TEXT],
    "clients": {"*": {"train": _SPLIT, "validation?": _SPLIT, "test": _SPLIT}},
    "unseen": {"*": {"test": _SPLIT}},
    "boxes": _FLAG,
    "number": _COUNT,
}
RECORD = {
    "round": _COUNT,
    "loss": {"*": _OR_NOTHING},
    "weights": {"*": _OR_NOTHING},
    "seconds": NUMBER,
    "accuracy?": _ACCURACY,
    "validation?": _ACCURACY,
    "unseen?": _UNSEEN,
    "mask_l1?": _ACCURACY,
    "measures?": _MEASURES,
    "unseen_measures?": _UNSEEN_MEASURES,
    "not_finite?": [TEXT],
    "clients?": [_INDEX],
    "*": _ANY,
}


def misfit(value: Any, form: Form, place: str = "it") -> str:
    """Returns what is wrong with a value read from JSON; "" if it has the form."""
    if isinstance(form, _Kind):
        return "" if form.holds(value) else f"{place} must be {form.word}"
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{place} must be a list"
        named = ((f"{place}[{i}]", one, form[0]) for i, one in enumerate(value))
    else:
        if not isinstance(value, dict):
            return f"{place} must be an object"
        keys = {key.rstrip("?") for key in form} - {"*"}
        missing = [key for key in form if key not in value and key[-1:] not in "?*"]
        if missing:
            return f"{place} has no {missing[0]!r}"
        further = form.get("*")
        named = (
            (f"{place}[{key[:40]!r}]", one, form.get(key, form.get(f"{key}?", further)))
            for key, one in value.items()
            if key in keys or further is not None
        )
    return next(filter(None, (misfit(one, of, name) for name, one, of in named)), "")
