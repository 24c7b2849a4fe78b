"""fedjax_bn: federated learning under feature shift.

  fedjax-bn --config CONFIG [--config.KEY=VALUE ...] [--workdir DIR]     train, or resume a run
  fedjax-bn COMMAND --help                                               help on one command

CONFIG is a file or the name of a packaged config, optionally with changes after a colon:
quickstart, configs/digits.py:method=fedavg,rounds=10. The same command resumes a stopped run.
`python -m fedjax_bn` is the same command.
"""

import argparse
import errno
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from absl import logging

from fedjax_bn import __version__
from fedjax_bn.arguments.errors import InterruptedRun, UserError
from fedjax_bn.arguments.text import file_name
from fedjax_bn.run.config.file import Changes, read, split_changes


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"{message}; `{self.prog} --help` has all")


def command() -> None:
    """Runs the command of `fedjax-bn`, `python -m fedjax_bn` and `python -m fedjax_bn.main`."""
    for stream in (sys.stdout, sys.stderr):
        # Names outside the terminal's encoding are printed as escapes.
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
    package = str(Path(__file__).parents[1])
    # `python -m` puts the current folder first, from which a file could then hide a library.
    if sys.path[0] == os.getcwd() != package and not sys.flags.safe_path:
        del sys.path[0]
    main(sys.argv, own_modules=True)


def main(argv: list[str], own_modules: bool = False) -> None:
    """Runs a command; a user's mistake ends it with an error message.

    With `own_modules` code in the current folder can be named on the command line.
    """
    logging.set_verbosity(logging.FATAL)  # Orbax logs the errors that it also raises
    try:
        options, changes = parse(argv)
        if own_modules and _names_code(options, changes):
            sys.path.append("")
        COMMANDS[options.command](options, changes)
        sys.stdout.flush()  # a full disk shows itself here at the latest
    except KeyboardInterrupt:  # before or after the rounds
        _fail("stopped at once: give the same command to continue", 130)
    except UserError as error:
        _fail(str(error), 130 if isinstance(error, InterruptedRun) else 2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        # Else Python would try to write the rest of the output when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:  # whoever reads a pipe, such as `head`, has read enough
            _fail(f"the output cannot be written ({error}): give it room or another place")


def _names_code(options: argparse.Namespace, changes: Changes) -> bool:
    # Whether the user may have named code, because a folder that is read must not choose code.
    values = (getattr(options, "adapt", ""), *(value for _, value in changes))
    trusted = getattr(options, "config", "") or getattr(options, "trust", False)
    return options.command == "train" or trusted or any(":" in value for value in values)


def parse(argv: list[str]) -> tuple[argparse.Namespace, Changes]:
    """Returns the parsed flags, with the `command`, and the changes of keys."""
    arguments = argv[1:]
    if not arguments or arguments[0] not in (*COMMANDS, "-h", "--help", "--version"):
        arguments = ["train", *arguments]
    changes, arguments = split_changes(arguments)
    options = _parser().parse_args(arguments)
    if changes and options.command not in ("train", "config", "evaluate", "serve", "cite"):
        _fail(f"--config.{changes[0][0]} is not for `{options.command}`: leave it out")
    if options.command == "serve":
        places = [bool(options.workdir), bool(options.export)]
        extra = options.renew and (changes or options.client or options.trust)
        if places != [not options.renew] * 2 or extra:
            _fail("--workdir and --export are required, or --renew alone: see `serve --help`")
    return options, changes


def _parser() -> argparse.ArgumentParser:
    everything = _Parser(
        prog="fedjax-bn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    everything.add_argument("--version", action="version", version=f"fedjax_bn {__version__}")
    commands = everything.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="fedjax-bn"
    )
    parsers = {}
    for name, run in COMMANDS.items():
        texts: dict[str, Any] = {"help": run.__doc__, "description": run.__doc__}
        parsers[name] = commands.add_parser(name, **texts, allow_abbrev=False)

    def flag(commands: str, name: str, flag_help: str, **options: Any) -> None:
        for command in commands.split():
            parsers[command].add_argument(name, help=flag_help, **options)

    # No shell puts the home folder for the ~ after `--FLAG=`.
    path = partial(flag, type=os.path.expanduser)
    config, on = "a file or a packaged config, see `fedjax-bn list configs`", "store_true"
    flag("train", "--config", f"{config}; --config.KEY=VALUE changes a key", required=True)
    path("train", "--workdir", "folder of the run; by default runs/CONFIG")
    several = "this process is one of several, see launch/README.md"
    flag("train", "--distributed", several, action=on, default=None)
    alone = "this process is alone, whatever its launcher says"
    flag("train", "--nodistributed", alone, action="store_false", dest="distributed")
    flag("config", "config", config, metavar="CONFIG")
    path("evaluate", "--workdir", "folder of the finished run", required=True)
    path("serve", "--workdir", "folder of the finished run")
    flag("evaluate", "--config", f"{config}; by default the run's own", default="")
    flag("evaluate", "--name", "name of the files it writes", default="evaluation")
    flag("evaluate", "--internal", "test the internal clients too", action=on)
    flag("evaluate", "--alphas", "record and plot the adapter's alphas", action=on)
    flag("evaluate", "--tsne", "plot t-SNE of features", action=on)
    flag("evaluate predict", "--resize", "stretch arrays of images to the model's size", action=on)
    flag("evaluate serve", "--trust", "import the code that the run's config.json names", action=on)
    path("serve", "--export", "the folder that is written")
    anew = "a served folder whose programs are written anew, from its arrays; it runs the old ones"
    path("serve", "--renew", anew, metavar="FOLDER")
    whose = "whose own model; by default what an unseen client receives"
    flag("serve", "--client", whose, default="", metavar="NAME")
    path("predict", "--model", "a folder that serve wrote", required=True)
    images = "an image or a scan, a folder of them, a .npz, or - for names of files from stdin"
    path("predict", "--data", images, required=True)
    flag("predict", "--adapt", "how; by default the first that was served", default="")
    out = "the file to write, by default the standard output, or for masks a new folder"
    path("predict", "--out", out, default="")
    flag("predict", "--trust", "run the compiled program in the folder, which is code", action=on)
    path("report", "folders", "finished runs", nargs="+", metavar="DIR")
    path("report", "--out", "the page, with its tables beside it", default="report.html")
    flag("report", "--baseline", "method that others are compared with", default="")
    flag("list", "names", "such as methods", nargs="*", metavar="KIND [NAME]")
    citable = "methods, adaptations, data sets; all for none"
    flag("cite", "names", citable, nargs="*", metavar="NAME")
    flag("cite", "--config", f"{config}: what it uses", default="")
    return everything


# Commands import modules that need JAX after the flags are parsed, so that mistakes in flags are
# reported without waiting for JAX.


def _train(options: argparse.Namespace, changes: Changes) -> None:
    """Trains the configured method and its baselines, or resumes them."""
    config = read(options.config, changes)
    from fedjax_bn.report.page import write_report
    from fedjax_bn.run.train import train_all
    from fedjax_bn.training.processes import join

    join(options.distributed)
    name = file_name(Path(options.config.partition(":")[0]).stem)
    train_all(config, Path(options.workdir or f"runs/{name}"), write_report)


def _config_command(options: argparse.Namespace, changes: Changes) -> None:
    """Prints what a configuration would train: data, shapes, what travels and what stays."""
    config = read(options.config, changes)
    from fedjax_bn.run.train import describe_run

    print(describe_run(config))


def _evaluate(options: argparse.Namespace, changes: Changes) -> None:
    """Tests a finished run without training."""
    from fedjax_bn.run.evaluate import Request, evaluate

    values = {name: getattr(options, name) for name in Request._fields[2:]}
    evaluate(Path(options.workdir), Request(options.config, changes, **values))


def _serve(options: argparse.Namespace, changes: Changes) -> None:
    """Writes what an unseen client receives from a finished run, or one client's own model."""
    from fedjax_bn.run.serve import renew_folder, run

    if options.renew:
        return renew_folder(Path(options.renew))
    to = Path(options.export)
    run(Path(options.workdir), to, changes, trust=options.trust, client=options.client)


def _predict(options: argparse.Namespace, _: Changes) -> None:
    """Writes the probabilities, or the masks, that a served model predicts."""
    from fedjax_bn.serving.predict import run

    names = ("model", "data", "adapt", "out", "resize", "trust")
    run(**{name: getattr(options, name) for name in names})


def _report(options: argparse.Namespace, _: Changes) -> None:
    """Writes a page that compares finished runs."""
    from fedjax_bn.report.page import write_comparison

    folders = [Path(folder) for folder in options.folders]
    files = write_comparison(folders, Path(options.out), options.baseline)
    print(f"written: {', '.join(map(str, files))}")


def _list(options: argparse.Namespace, _: Changes) -> None:
    """Prints all names of a kind, such as methods, or the options of one name."""
    from fedjax_bn.run.listing import listing

    print(listing(options.names))


def _cite(options: argparse.Namespace, changes: Changes) -> None:
    """Prints BibTeX of methods and what they build on, adaptations and data sets."""
    from fedjax_bn.references import cite, cite_config

    if options.config:
        stem = Path(options.config.partition(":")[0]).stem
        print(cite_config(read(options.config, changes), stem))
    if options.names or not options.config:
        print(cite(*options.names))


COMMANDS = {
    "train": _train,
    "config": _config_command,
    "evaluate": _evaluate,
    "serve": _serve,
    "predict": _predict,
    "report": _report,
    "list": _list,
    "cite": _cite,
}


def _fail(message: str, status: int = 2) -> NoReturn:
    """Prints a message in one line and exits; each of several processes prints its own."""
    message = " ".join(message.splitlines())  # names may have line breaks
    print(f"fedjax_bn: {message}", file=sys.stderr)
    if "fedjax_bn.training.processes" in sys.modules:
        from fedjax_bn.training.processes import leave

        leave(status)  # which returns if this is the only process
    sys.exit(status)


if __name__ == "__main__":
    command()
