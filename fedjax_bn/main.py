"""The command line.

python -m fedjax_bn.main --config configs/NAME.py --workdir DIR
python -m fedjax_bn.main evaluate --workdir DIR [--config.adaptations=running,tsmobn]
"""

import signal
import sys
from pathlib import Path
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict

from fedjax_bn.run.config import EXAMPLE, changes_of, read
from fedjax_bn.run.errors import ConfigError, InterruptedRun, UserError

CONFIG = flags.DEFINE_string(
    "config",
    None,
    "config file, optionally with changes, such as configs/digits.py:method=fedavg,rounds=10; "
    "--config.KEY=VALUE changes one key",
)
NAME = flags.DEFINE_string("name", "evaluation", "evaluate: name of the files it writes")
INTERNAL = flags.DEFINE_bool("internal", False, "evaluate: test the internal clients too")
ALPHAS = flags.DEFINE_bool("alphas", False, "evaluate: record and plot the adapter's alphas")
TSNE = flags.DEFINE_bool("tsne", False, "evaluate: plot t-SNE of features")
WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run; default runs/CONFIG_NAME")


def main(argv: list[str]) -> None:
    """Dispatches to a command; a user's mistake ends with one sentence."""
    logging.set_verbosity(logging.FATAL)  # Orbax logs the errors that it also raises
    command, arguments = argv[1] if argv[1:] else "", argv[2:]
    if command not in COMMANDS:
        command, arguments = "train", argv[1:]
    try:
        COMMANDS[command](arguments)
    except InterruptedRun as stop:
        fail(str(stop), status=130)
    except KeyboardInterrupt:
        fail("stopped at once: give the same command to go on from the last checkpoint", 130)
    except UserError as error:
        fail(str(error))


def train(arguments: list[str]) -> None:
    """Trains the configured method and its baselines."""
    for flag in (NAME, INTERNAL, ALPHAS, TSNE):
        if flag.value != flag.default:
            raise ConfigError(f"--{flag.name} belongs to `evaluate`: leave it out to train")
    config = read_config(CONFIG.value, changes_of(arguments))
    # Not before the flags are parsed: mistakes in them answer without waiting for JAX.
    from fedjax_bn.run.commands import train_all

    train_all(config, Path(WORKDIR.value or f"runs/{Path(CONFIG.value.partition(':')[0]).stem}"))


def evaluate(arguments: list[str]) -> None:
    """Tests the finished run in --workdir."""
    changes = changes_of(arguments)
    if not WORKDIR.value:
        raise ConfigError("evaluate needs the workdir of a finished run: --workdir DIR")
    from fedjax_bn.run import commands
    from fedjax_bn.run.evaluate_finished import Request

    request = Request(
        CONFIG.value or "", changes, NAME.value, INTERNAL.value, ALPHAS.value, TSNE.value
    )
    commands.evaluate(Path(WORKDIR.value), request)


COMMANDS = {"train": train, "evaluate": evaluate}


def parse_flags(argv: list[str]) -> list[str]:
    """Parses our flags and returns what is left, the changes of the configuration."""
    flags.FLAGS.set_gnu_getopt(True)  # else the value in `--config.KEY VALUE` ends the flags
    try:
        return flags.FLAGS(argv, known_only=True)
    except flags.Error as error:
        fail(str(error))


def read_config(source: str | None, changes: list[tuple[str, str]]) -> ConfigDict:
    """The configuration of a file, with changes; errors are those of `config.read`."""
    if not source:
        raise ConfigError(f"give a config file: --config {EXAMPLE}")
    return read(source, changes)


def fail(message: str, status: int = 2) -> NoReturn:
    """Prints one sentence and exits."""
    print(f"fedjax_bn: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    app.run(main, flags_parser=parse_flags)
