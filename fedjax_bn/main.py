"""The command line: `python -m fedjax_bn.main --config configs/NAME.py --workdir DIR`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from fedjax_bn.config import check_key
from fedjax_bn.errors import ConfigError, InterruptedRun, UserError

CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "config file, optionally with changes, such as configs/digits.py:method=fedavg,rounds=10",
)
WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run; default runs/CONFIG_NAME")


def main(argv: list[str]) -> None:
    """Runs the configured method and its baselines; a user's mistake ends with one sentence."""
    del argv
    logging.set_verbosity(logging.WARNING)
    # Not before the flags are parsed: mistakes in them answer without waiting for JAX.
    from fedjax_bn import train
    from fedjax_bn.report import tables, write_report

    folder = Path(WORKDIR.value or Path("runs") / config_name(sys.argv))
    try:
        summaries = [train.run(config, workdir) for config, workdir in runs(CONFIG.value, folder)]
        if not (folder / "report.html").exists():
            write_report(folder)
    except InterruptedRun as stop:
        fail(str(stop), status=130)
    except UserError as error:
        fail(str(error))
    print(f"\n{tables.comparison(summaries)}")
    print(f"\nsummary.json, plots and report.html are in {folder}")


def runs(config: ConfigDict, folder: Path) -> Iterator[tuple[ConfigDict, Path]]:
    """The runs of one command: the method itself, then its baselines in folders of their own."""
    yield config, folder
    for method in config.baselines:
        baseline = config.copy_and_resolve_references()
        baseline.update(method=method, share="", baselines=())
        yield baseline, folder / "baselines" / method


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the flags; an unknown key or a wrong type ends with one sentence and status 2."""
    try:
        rest = flags.FLAGS(argv)
        if len(rest) > 1:
            raise ConfigError(f"unexpected argument {rest[1]!r}: options are --name=value")
        if CONFIG.value is None:
            raise ConfigError("give a config file: --config configs/quickstart.py")
        if not isinstance(CONFIG.value, ConfigDict):
            raise FileNotFoundError(f"no config file {config_path(argv)}")
        return rest
    except AttributeError as error:  # ml_collections' answer to an unknown key
        fail(unknown_key(argv) or str(error))
    except (flags.Error, UserError, OSError, SyntaxError, TypeError) as error:
        fail(str(error))


def unknown_key(argv: list[str]) -> str | None:
    """The message on the first `--config.KEY` that the config file does not have."""
    config = CONFIG.value
    for argument in argv[1:]:
        name = argument.lstrip("-").partition("=")[0]
        if name.startswith("config."):
            try:
                check_key(config, name.removeprefix("config."))
            except ConfigError as error:
                return str(error)
    return None


def config_path(argv: list[str]) -> str:
    """The value of --config without its changes."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, _, value = argument.lstrip("-").partition("=")
        if name == "config":
            return (value or following).partition(":")[0]
    return ""


def config_name(argv: list[str]) -> str:
    """The config file's name, for the default workdir."""
    return Path(config_path(argv)).stem


def fail(message: str, status: int = 2) -> NoReturn:
    """Prints one sentence and exits."""
    print(f"fedjax_bn: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
