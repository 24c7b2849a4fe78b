"""Compares what a client would train with what the server does, and names what differs.

Both sides state their facts as JSON, and are equal if the digests of these are:

    settings    the method, and how samples are read (`_SETTINGS`)
    form        of the samples: shape, dtype, classes, mean and std (`data.domain.form_of`)
    network     leaf -> whether it is shared, personal or frozen, its dtype and shape

The server's have only settings before its first clients have stated the form of their samples.
"""

import hashlib
import json
from collections.abc import Mapping, Set
from typing import Any

import jax

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import first_few, short
from fedjax_bn.engine.named_arrays import names_of
from fedjax_bn.state import FederatedState

Facts = Mapping[str, Any]
_SETTINGS = ("image_size", "orientation", "large", "plane", "window", "augment", "perturb")
_ALIKE = "must be the same in every site's config file and version of fedjax_bn"
# aspect of the form -> what to do where it differs
_REMEDIES = {
    "image size": "scale its images, or set data.image_size for all sites",
    "number of channels": "store its samples with as many",
    "type of pixels": "store its samples in that type",
    "normalization": "read its data as the others are read",
    "classes": "name the same ones in the same order, by data.classes or in its data",
}


def facts_of(config: Any, form: Facts | None = None, like: FederatedState | None = None) -> str:
    """Returns the facts of a configuration, of samples and of the state of one client, as JSON."""
    settings = {f"data.{key}": config.data[key] for key in _SETTINGS}
    facts: dict[str, Any] = {"settings": {"method": config.method} | settings}
    if form is not None:
        names = {"dataset", "clients"}  # they need not be equal
        facts["form"] = {key: value for key, value in form.items() if key not in names}
    if like is not None:
        facts["network"] = _leaves(like)
    return json.dumps(facts, sort_keys=True)


def digest_of(facts: str) -> str:
    """Returns the SHA-256 of facts."""
    return hashlib.sha256(facts.encode()).hexdigest()


def difference(site_facts: str, server_facts: str) -> str:
    """Returns how a site's facts differ from the server's, in the parts of both; "" if they do not.

    It names both values and a remedy. Leaves are named only where all else is equal, because
    another image size or number of classes changes them too.
    """
    site, server = json.loads(site_facts), json.loads(server_facts)
    parts = site.keys() & server.keys()
    values, expected = _in_words(site, server, parts), _in_words(server, site, parts)
    names = [n for n in dict.fromkeys((*expected, *values)) if values.get(n) != expected.get(n)]
    leaves = [name for name in names if name.startswith("leaf ")]
    names = [name for name in names if name not in leaves] or leaves[:1]
    changed = f"leaves that differ: {len(leaves)}; model, share, frozen and precision {_ALIKE}"
    remedies = dict.fromkeys(leaves, changed) | _REMEDIES
    return "; ".join(
        f"it has the {name} {short(values.get(name, 'not'), 150)}, the server "
        f"{short(expected.get(name, 'not'), 150)}: {remedies.get(name, _ALIKE)}"
        for name in names
    )


def require_equal(site_facts: str, server_facts: str) -> None:
    """Raises ConfigError that names the difference, if there is one; "" are no facts."""
    if server_facts and (fault := difference(site_facts, server_facts)):
        raise ConfigError(fault)


def _leaves(like: FederatedState) -> dict[str, str]:
    """Returns leaf -> whose it is, its dtype and shape, such as "shared float32[3, 3]"."""
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), like.personal)
    table = {}
    for part, tree in {"shared": like.shared, "personal": row, "frozen": like.frozen}.items():
        for name, leaf in zip(names_of(tree), jax.tree.leaves(tree), strict=True):
            table[name] = f"{part} {leaf.dtype}{list(leaf.shape)}"
    return table


def _in_words(facts: Facts, others: Facts, parts: Set[str]) -> dict[str, str]:
    """Returns what facts have in some parts, by name, in words."""
    texts = {key: str(value) for key, value in facts["settings"].items()}
    if "form" in parts:
        form = facts["form"]
        *sides, channels = form["shape"]
        texts |= {"image size": "x".join(map(str, sides)) or "none"}
        texts |= {"number of channels": str(channels), "type of pixels": form["dtype"]}
        texts |= {"normalization": f"mean {form['mean']} and std {form['std']}"}
        texts |= {"classes": _numbered(form, others["form"])}
        texts |= {"masks": str(form.get("masks", "not")), "boxes": str(form.get("boxes", "not"))}
    leaves = facts["network"] if "network" in parts else {}
    return texts | {f"leaf {name}": text for name, text in leaves.items()}


def _numbered(form: Facts, other_form: Facts) -> str:
    """Returns how many classes there are, and those that are not at the same place elsewhere."""
    names, others = (
        facts.get("classes") or ["unnamed"] * facts["num_classes"] for facts in (form, other_form)
    )
    differing = [f"{k}={name}" for k, name in enumerate(names) if [name] != others[k : k + 1]]
    return f"{len(names)} ({first_few(differing)})" if differing else str(len(names))
