"""The command line: `python -m fedjax_bn.main --config configs/NAME.py --workdir DIR`."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict

from fedjax_bn.config import EXAMPLE, read
from fedjax_bn.errors import ConfigError, InterruptedRun, UserError

CONFIG = flags.DEFINE_string(
    "config",
    None,
    "config file, optionally with changes, such as configs/digits.py:method=fedavg,rounds=10; "
    "--config.KEY=VALUE changes one key",
)
WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run; default runs/CONFIG_NAME")


def main(argv: list[str]) -> None:
    """Runs the configured method and its baselines; a user's mistake ends with one sentence."""
    logging.set_verbosity(logging.FATAL)  # Orbax logs the errors that it also raises
    try:
        config = read_config(CONFIG.value, argv[1:])
        name = Path(CONFIG.value.partition(":")[0]).stem
        run(config, Path(WORKDIR.value or f"runs/{name}"))
    except InterruptedRun as stop:
        fail(str(stop), status=130)
    except KeyboardInterrupt:
        fail("stopped inside a round: give the same command to go on from the last checkpoint", 130)
    except UserError as error:
        fail(str(error))


def run(config: ConfigDict, folder: Path) -> None:
    """Trains, then writes the report and prints the table."""
    # Not before the flags are parsed: mistakes in them answer without waiting for JAX.
    from fedjax_bn import train
    from fedjax_bn.report import tables, write_report

    summaries = [train.run(config, workdir) for config, workdir in runs(config, folder)]
    if not (folder / "report.html").exists():
        write_report(folder)
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
    """Parses our flags and returns what is left, the changes of the configuration."""
    flags.FLAGS.set_gnu_getopt(True)  # else the value in `--config.KEY VALUE` ends the flags
    try:
        return flags.FLAGS(argv, known_only=True)
    except flags.Error as error:
        fail(str(error))


def read_config(source: str | None, arguments: list[str]) -> ConfigDict:
    """The configuration of a file and of arguments `--config.KEY=VALUE` or `--config.KEY VALUE`.

    Raises:
      ConfigError: there is no file, an argument is none of these, or as `config.read`.
    """
    if not source:
        raise ConfigError(f"give a config file: --config {EXAMPLE}")
    changes, left = [], iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if not name.startswith(("--config.", "-config.")):
            raise ConfigError(
                f"unknown argument {argument!r}: allowed are --config, --config.KEY=VALUE and "
                "--workdir, see --help"
            )
        value = value if equals else next(left, None)
        if value is None:
            raise ConfigError(f"{name} has no value: write {name}=VALUE")
        changes.append((name.partition(".")[2], value))
    return read(source, changes)


def fail(message: str, status: int = 2) -> NoReturn:
    """Prints one sentence and exits."""
    print(f"fedjax_bn: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    app.run(main, flags_parser=parse_flags)
