"""fedjax_bn: federated learning under feature shift.

  fedjax-bn --config CONFIG [--config.KEY=VALUE ...] [--workdir DIR]     train, or resume a run
  fedjax-bn evaluate --workdir DIR [--config CONFIG] [--config.KEY=VALUE ...]   test a finished run
  fedjax-bn serve --workdir DIR --export FOLDER [--client NAME]   write a model to be used
  fedjax-bn predict --model FOLDER --data IMAGES [--adapt tsmobn]   write probabilities, or masks
  fedjax-bn report DIR... [--out FILE] [--baseline METHOD]         compare finished runs on a page
  fedjax-bn list methods|models|datasets|adaptations|configs|keys        list what can be named
  fedjax-bn COMMAND --help                                this help for one command
  fedjax-bn --version                                     the version of this library

CONFIG is a file or the name of a packaged config, optionally with changes after a colon:
quickstart, configs/digits.py:method=fedavg,rounds=10. The same command resumes a stopped run.
`python -m fedjax_bn` is the same command.
"""

import os
import re
import sys
from pathlib import Path
from typing import NoReturn

from absl import flags, logging

from fedjax_bn import __version__
from fedjax_bn.arguments.errors import ConfigError, InterruptedRun, UserError
from fedjax_bn.arguments.text import brief, file_name, one_line
from fedjax_bn.run.config.file import changes_of, read


class _Path(flags.ArgumentParser):
    """Reads a flag that is a path: ~ is the home folder, which no shell puts after `--FLAG=`."""

    def parse(self, argument: str) -> str:
        """Returns the path; a ValueError has why the system can have none, such as its length."""
        path = os.path.expanduser(argument)
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):  # it may be written
            pass
        except OSError as error:
            raise ValueError(error.strerror) from error
        return path


def _path(name: str, default: str | None, text: str) -> flags.FlagHolder:
    return flags.DEFINE(_Path(), name, default, text)


CONFIG = flags.DEFINE_string(
    "config",
    None,
    "a file or a packaged config, see `fedjax-bn list configs`; --config.KEY=VALUE changes a key",
)
_WORKDIR = _path(
    "workdir",
    None,
    "train: folder of the run, default runs/CONFIG; evaluate, serve: folder of the finished run",
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", None, "train: this process is one of several, see launch/README.md"
)
_EXPORT = _path("export", None, "serve: the folder that is written")
_CLIENT = flags.DEFINE_string(
    "client", "", "serve: whose own model; default what an unseen client receives"
)
_MODEL = _path("model", None, "predict: a folder that serve wrote")
_DATA = _path(
    "data",
    None,
    "predict: an image or a scan, a folder of them, a .npz, or - for names of files from stdin",
)
_ADAPT = flags.DEFINE_string("adapt", "", "predict: how; default the first that was served")
_OUT = _path(
    "out",
    "",
    "predict: the file to write, default the standard output, or for masks a new folder; "
    "report: the page, default "
    "report.html, with its tables beside it as text",
)
_RESIZE = flags.DEFINE_bool(
    "resize", False, "evaluate, predict: stretch arrays of images of another size to the model's"
)
_BASELINE = flags.DEFINE_string(
    "baseline", "", "report: method that others are compared with; default fedavg"
)
_TRUST = flags.DEFINE_bool(
    "trust",
    False,
    "evaluate, serve: import the code that the run's config.json names; "
    "predict: run the compiled program in the model's folder, which is code",
)
_ONLY_EVALUATE = (
    flags.DEFINE_string("name", "evaluation", "evaluate: name of the files it writes"),
    flags.DEFINE_bool("internal", False, "evaluate: test the internal clients too"),
    flags.DEFINE_bool("alphas", False, "evaluate: record and plot the adapter's alphas"),
    flags.DEFINE_bool("tsne", False, "evaluate: plot t-SNE of features"),
)
# Command -> flags that other commands refuse, in the order of the fields of its `Request`.
OWNED = {
    "evaluate": (*_ONLY_EVALUATE, _RESIZE, _TRUST),
    "serve": (_EXPORT, _TRUST, _CLIENT),
    "predict": (_MODEL, _DATA, _ADAPT, _OUT, _RESIZE, _TRUST),
    "report": (_OUT, _BASELINE),
}
TAKES = {
    "train": (CONFIG, _WORKDIR, _DISTRIBUTED),
    "evaluate": (_WORKDIR, CONFIG, *OWNED["evaluate"]),
    "serve": (_WORKDIR, *OWNED["serve"]),
    "predict": OWNED["predict"],
    "report": OWNED["report"],
    "list": (),
}
OURS = tuple({flag.name: flag for flags in TAKES.values() for flag in flags}.values())
_HELP = ("--help", "-help", "-h", "help")
_VERSION = ("--version", "-version", "-V", "version")


def command() -> None:
    """Runs the command of `fedjax-bn`, `python -m fedjax_bn` and `python -m fedjax_bn.main`."""
    for stream in (sys.stdout, sys.stderr):
        # Names outside the terminal's encoding are printed as escapes.
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
    here, ours = sys.path[0], str(Path(__file__).parents[1])
    if here == os.getcwd() != ours and not sys.flags.safe_path:  # which `python -m` puts first
        del sys.path[0]
    argv = parse_flags(sys.argv)
    # Modules in the current folder can be imported only if the user may have named code on the
    # command line, because a folder that is read must not choose code. Flags are not parsed for
    # help and the version.
    if flags.FLAGS.is_parsed():
        typed = (CONFIG.value, _TRUST.value, ":" in "".join((_ADAPT.value, *argv)))
        if argv[1:2] == [] or argv[1] not in (*OWNED, "list") or any(typed):
            sys.path.append("")
    main(argv)


def main(argv: list[str]) -> None:
    """Runs a command; a user's mistake ends it with an error message."""
    logging.set_verbosity(logging.FATAL)  # Orbax logs the errors that it also raises
    name, arguments = argv[1] if argv[1:] else "", argv[2:]
    if name not in COMMANDS:
        name, arguments = "train", argv[1:]
    try:
        if name not in (*_HELP, *_VERSION, "list"):  # for which flags may not be parsed
            _refuse_others(name)
        COMMANDS[name](arguments)
    except InterruptedRun as stop:
        fail(str(stop), status=130)
    except KeyboardInterrupt:  # if `main` is called without `command`, as in a notebook
        fail("stopped at once: give the same command to continue", 130)
    except UserError as error:
        fail(str(error))


def _refuse_others(name: str) -> None:
    """Raises ConfigError for a flag that belongs to other commands."""
    for flag in OURS:
        # Flags of absl cannot be compared by ==.
        owners = [one for one, taken in TAKES.items() if any(flag is other for other in taken)]
        if flag.value != flag.default and name not in owners:
            named = " and ".join(f"`{owner}`" for owner in owners)
            raise ConfigError(f"--{flag.name} belongs to {named}: leave it out to {name}")


# Commands import modules that need JAX after they have checked their flags, so that mistakes in
# flags are reported without waiting for JAX.


def _train(arguments: list[str]) -> None:
    """Trains the configured method and its baselines."""
    changes = changes_of(arguments)
    if not CONFIG.value:
        raise ConfigError(
            "give a config: --config quickstart, or --config FILE; `fedjax-bn list configs` "
            "names all, `fedjax-bn --help` shows what else there is"
        )
    config = read(CONFIG.value, changes)
    from fedjax_bn.run.commands import train_all
    from fedjax_bn.training.together import join

    join(_DISTRIBUTED.value)
    name = file_name(Path(CONFIG.value.partition(":")[0]).stem)
    train_all(config, Path(_WORKDIR.value or f"runs/{name}"))


def _evaluate(arguments: list[str]) -> None:
    """Tests the finished run in --workdir."""
    changes = changes_of(arguments)
    if not _WORKDIR.value:
        raise ConfigError("evaluate needs the workdir of a finished run: --workdir DIR")
    from fedjax_bn.run import commands
    from fedjax_bn.run.finished_run import Request

    request = Request(CONFIG.value or "", changes, *(flag.value for flag in OWNED["evaluate"]))
    commands.evaluate(Path(_WORKDIR.value), request)


def _serve(arguments: list[str]) -> None:
    """Writes what an unseen client receives from the finished run in --workdir, or --client's."""
    changes = changes_of(arguments)
    if not (_WORKDIR.value and _EXPORT.value):
        raise ConfigError(
            "serve needs the workdir of a finished run and a folder to write: --workdir DIR "
            "--export FOLDER"
        )
    from fedjax_bn.run.serve import run

    run(Path(_WORKDIR.value), Path(_EXPORT.value), changes, print, _TRUST.value, _CLIENT.value)


def _predict(arguments: list[str]) -> None:
    """Writes the probabilities, or the masks, that a served model predicts."""
    if arguments:
        raise ConfigError(
            f"predict takes no argument {brief(arguments[0])}: `fedjax-bn --help` has all"
        )
    if not (_MODEL.value and _DATA.value):
        raise ConfigError(
            "predict needs a served model and images: --model FOLDER --data IMAGES; `fedjax-bn "
            "serve` writes such a folder"
        )
    from fedjax_bn.run.predict import Request, run

    run(Request(*(flag.value for flag in OWNED["predict"])))


def _report(arguments: list[str]) -> None:
    """Writes a page that compares the finished runs in folders."""
    if wrong := [argument for argument in arguments if argument.startswith("-")]:
        raise ConfigError(
            f"unknown argument {brief(wrong[0])}: report takes DIR..., --out, --baseline"
        )
    if not arguments:
        raise ConfigError("report needs folders with finished runs: fedjax-bn report DIR...")
    try:
        folders = [Path(_Path().parse(folder)) for folder in arguments]
    except ValueError as error:
        raise ConfigError(f"{' '.join(arguments)}: {error}") from error
    from fedjax_bn.report.page import write_comparison

    files = write_comparison(folders, Path(_OUT.value or "report.html"), _BASELINE.value)
    print(f"written: {', '.join(map(str, files))}")


def _list(arguments: list[str]) -> None:
    """Prints all names of a kind, such as methods."""
    from fedjax_bn.run.listing import listing

    print(listing(arguments))


def _help(arguments: list[str]) -> None:
    """Prints help on the command line or on one command."""
    name = next((word for word in arguments if word in TAKES), "")
    if not name:
        ours = (flags.FLAGS[flag.name] for flag in OURS)
        print("\n".join((str(__doc__), *(f"  --{flag.name:12}{flag.help}" for flag in ours))))
        return

    def of_command(flag: flags.FlagHolder) -> str:
        """Returns the command's part of a help like "predict: the file; report: the page"."""
        text = str(flags.FLAGS[flag.name].help)
        parts = (part.partition(": ") for part in re.split("; (?=[a-z, ]+: )", text))
        return "; ".join(rest for owners, _, rest in parts if name in owners.split(", ")) or text

    usage = [line.split("   ")[0] for line in str(__doc__).splitlines() if "  fedjax-bn " in line]
    own = [line for line in usage if f"fedjax-bn {name} " in f"{line} "] or usage[:1]
    taken = (f"  --{flag.name:12}{of_command(flag)}" for flag in TAKES[name])
    print("\n".join((*own, "", str(COMMANDS[name].__doc__), *("",) * bool(TAKES[name]), *taken)))


def _version(arguments: list[str]) -> None:
    """Prints the version of this library."""
    del arguments
    print(f"fedjax_bn {__version__}")


COMMANDS = {
    "train": _train,
    "evaluate": _evaluate,
    "serve": _serve,
    "predict": _predict,
    "report": _report,
    "list": _list,
} | {**dict.fromkeys(_HELP, _help), **dict.fromkeys(_VERSION, _version)}


def parse_flags(argv: list[str]) -> list[str]:
    """Parses our flags and returns what is left: the command, and changes of the configuration."""
    if set(argv) & set(_HELP):
        return [argv[0], _HELP[0], *argv[1:]]
    if argv[1:2] == [_VERSION[-1]] or set(argv) & set(_VERSION[:-1]):
        return [argv[0], _VERSION[0]]
    flags.FLAGS.set_gnu_getopt(True)  # else the value in `--config.KEY VALUE` ends the flags
    try:
        return flags.FLAGS(argv, known_only=True)
    except (flags.Error, ValueError) as error:  # of absl's own flags, and of --noFLAG=VALUE
        fail(one_line(error))


def fail(message: str, status: int = 2) -> NoReturn:
    """Prints a message in one line and exits; each of several processes prints its own."""
    message = " ".join(message.splitlines())  # names may have line breaks
    if "fedjax_bn.training.together" not in sys.modules:  # one process
        print(f"fedjax_bn: {message}", file=sys.stderr)
        sys.exit(status)
    from fedjax_bn.training.together import leave, number

    print(f"fedjax_bn{number()}: {message}", file=sys.stderr)
    leave(status)
    sys.exit(status)


if __name__ == "__main__":
    command()
