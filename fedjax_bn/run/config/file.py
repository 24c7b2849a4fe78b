"""Reads configurations: a user's files, those of the package, and changes of keys."""

import os
import runpy
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import brief, nearest, one_line
from fedjax_bn.run.config import assign, check

Changes = Sequence[tuple[str, str]]  # dotted key, text
_EXAMPLE = "configs/quickstart.py"
_PACKAGE = Path(__file__).parents[2]


def read(source: str, changes: Changes = ()) -> ConfigDict:
    """Runs a config file and applies changes to what its `get_config` returns.

    The source is FILE.py or the name of a packaged config (`pacs`, `pacs.py` or `configs/pacs.py`),
    optionally with changes after a colon, FILE.py:key=value,key=value. A file that fails, an
    unknown key, and a value of a wrong type or range are ConfigErrors.
    """
    name, _, inline = source.partition(":")
    path = _find_config(name)
    try:
        get_config = runpy.run_path(str(path))["get_config"]
        config = get_config(inline) if inline else get_config()
        for key, text in changes:
            assign(config, key, text)
        check(config)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's own file may raise
        raise ConfigError(
            f"config file {path} fails ({type(error).__name__}: {one_line(error)}): it must define "
            f"get_config(changes='') that returns a ConfigDict, see {_EXAMPLE}"
        ) from error
    return config


def _find_config(name: str) -> Path:
    if os.path.isfile(name):
        return Path(name)
    packaged = packaged_configs()
    stem = name.removeprefix("configs/").removesuffix(".py")
    if stem not in packaged:
        raise ConfigError(f"no config file {brief(name)}{nearest(Path(name).stem, packaged)}")
    return packaged[stem]


def packaged_configs() -> dict[str, Path]:
    """Returns the packaged configs, name -> file; in a checkout they are beside the package."""
    inside = _PACKAGE / "configs"
    folder = inside if inside.is_dir() else _PACKAGE.parent / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def split_changes(arguments: Sequence[str]) -> tuple[Changes, list[str]]:
    """Splits `--config.KEY=VALUE` and `--config.KEY VALUE` from the other arguments."""
    # ml_collections' own flags need a --config, but `evaluate` and `serve` change keys of a
    # configuration that a finished run has recorded.
    changes, plain_arguments, remaining = [], [], iter(arguments)
    for argument in remaining:
        if argument.startswith("--config."):
            key, equals, value = argument.removeprefix("--config.").partition("=")
            changes.append((key, value if equals else next(remaining, "")))
        else:
            plain_arguments.append(argument)
    return changes, plain_arguments
