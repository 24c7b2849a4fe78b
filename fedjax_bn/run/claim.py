"""Whose workdir a folder is: of one configuration and its data, as its config.json says."""

import json
from pathlib import Path
from typing import Any

from fedjax_bn.run.config import up_to_date
from fedjax_bn.run.errors import WorkdirError
from fedjax_bn.run.forms import CLAIM
from fedjax_bn.run.workdir import read_json, write_json

# Where data and compiled programs are kept, what is too large to be read, what is written besides,
# and the devices change no result (the devices: but for the order of sums, which
# `machine.difference` says).
_MAY_DIFFER = {
    "compilation_cache",
    "data.cache",
    "data.device_megabytes",
    "data.max_megapixels",
    "mesh",
    "predictions",
}


def claim(workdir: Path, config: dict[str, Any], about: dict[str, Any]) -> None:
    """Makes a folder the workdir of one configuration, or checks that it is already.

    Args:
      workdir: the folder, new or of an earlier start of the same run.
      config: flat configuration, dotted key -> value.
      about: versions, devices and data, recorded at the first start.

    Raises:
      WorkdirError: as `check_claim`, or the folder cannot be written to.
    """
    check_claim(workdir, config, about)
    if not (workdir / "config.json").exists():
        write_json(workdir / "config.json", {"config": config, **about})


def check_claim(workdir: Path, config: dict[str, Any], about: dict[str, Any]) -> None:
    """Checks, and writes nothing, that a folder may be or is the workdir of a configuration.

    Args:
      workdir: the folder, new or of an earlier start of the same run.
      config: flat configuration, dotted key -> value; must be equal on every start, but for keys
        that change no result (`_MAY_DIFFER`).
      about: of it only "data" must be equal.

    Raises:
      WorkdirError: the folder holds a run of another configuration or of other data, or holds
        files that are no run's.
    """
    if not (workdir / "config.json").exists():
        _check_unused(workdir)
        return
    new = json.loads(json.dumps({"config": config, **about}))
    old = read_json(workdir / "config.json", CLAIM)
    old["config"] = json.loads(json.dumps(up_to_date(old["config"])))
    keys = sorted({*old["config"], *new["config"]} - _MAY_DIFFER)
    changes = [
        f"{key:.40} ({_short(old['config'].get(key))} there, {_short(new['config'].get(key))} now)"
        for key in keys
        if old["config"].get(key) != new["config"].get(key)
    ]
    if not changes and old["data"] != new["data"]:
        changes = ["the data themselves (their hash)"]
    if changes:
        raise WorkdirError(
            f"{workdir} belongs to a run of another configuration; these differ: "
            f"{', '.join(changes[:8])}. Give another --workdir, or the old values to go on"
        )


def _short(value: Any) -> str:
    """A value as Python spells it, of what is long only the beginning."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_unused(workdir: Path) -> None:
    """Raises WorkdirError if a workdir without config.json is a file or holds anything."""
    if workdir.exists() and not workdir.is_dir():
        raise WorkdirError(f"{workdir} is a file: give a folder with --workdir")
    # Hidden files are what a run leaves that was killed before it wrote its config.json.
    names = sorted(path.name for path in workdir.glob("*") if path.name[0] != ".")
    if names:
        raise WorkdirError(
            f"{workdir} is not empty ({names[0]}, ...) and holds no config.json of a run: give an "
            "empty or new folder with --workdir"
        )
