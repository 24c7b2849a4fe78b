"""Cites, as BibTeX, what a method builds on, an adaptation or a data set.

`references.bib` has the entries. Their `keywords` are the names for which each is printed.
"""

import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import brief, nearest

_ENTRY = re.compile(r"^(@.*?),\n  keywords = \{(.*?)\}\n\}", re.MULTILINE | re.DOTALL)
# Keys of a configuration whose values `references.bib` may know; others need no citation.
_KEYS = ("method", "share", "weigh", "baselines", "adaptations")
_OF_DATA = ("name", "perturb", "augment")


def cite(*names: str | Callable[..., Any]) -> str:
    """Returns the BibTeX entries of methods, adaptations, data sets and other names; all for none.

    A method may be its function, and a name may have options, as in "fedcd:lambda_sci=0.1".
    ConfigError for an unknown name.
    """
    citable = frozenset().union(*_entries().values())
    texts = (x if isinstance(x, str) else getattr(x, "__name__", repr(x)) for x in names)
    chosen = {text.partition(":")[0] for text in texts}
    if uncited := sorted(chosen - citable):
        raise ConfigError(f"nothing is cited for {brief(uncited[0])}{nearest(uncited[0], citable)}")
    return _printed(chosen or citable)


def cite_config(config: Any, stem: str) -> str:
    """Returns the entries of what a configuration uses, whose file has the name `stem`."""
    texts = [config.data[key] for key in _OF_DATA] + ["privacy" * bool(config.privacy)]
    for key in _KEYS:
        texts += [config[key]] if isinstance(config[key], str) else config[key]
    return _printed({text.partition(":")[0] for text in texts} | {f"configs/{stem}"})


def _printed(names: Iterable[str]) -> str:
    entries = (entry for entry, keywords in _entries().items() if not keywords.isdisjoint(names))
    return "\n\n".join(entries)


@cache
def _entries() -> dict[str, frozenset[str]]:
    """Returns entry -> the names for which it is cited, in the order of the file."""
    text = files("fedjax_bn").joinpath("references.bib").read_text(encoding="utf-8")
    entries = _ENTRY.findall(text)
    return {f"{entry}\n}}": frozenset(re.split(r",\s+", names)) for entry, names in entries}
