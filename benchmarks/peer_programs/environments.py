"""An environment for each program: a folder made by `venv`, with pinned packages from pip."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TORCH = "torch==2.13.0"  # the one of `make benchmark`


class Program(NamedTuple):
    """A program to compare.

    Attributes:
      module: in `peer_programs`.
      packages: for pip; none: it runs in this Python, whose packages are this library's.
    """

    module: str
    packages: tuple[str, ...] = ()


PROGRAMS = {
    "ours": Program("ours"),
    "PyTorch": Program("plain_pytorch", (TORCH, "numpy==2.4.6")),
    "Flower": Program("flower", (TORCH, "flwr[simulation]==1.41.0")),
    "pfl-research": Program("pfl_research", (TORCH, "pfl==0.6.0")),
}


def prepare(
    folder: Path, program: Program, python: str, say: Callable[[str], object] = print
) -> tuple[str | None, str]:
    """The interpreter of a program's environment, made where it is not there yet.

    Args:
      folder: where environments are.
      program: whose.
      python: makes new environments.
      say: prints.

    Returns:
      Its path, or None and why it could not be made, in pip's or venv's last words.
    """
    home = folder / program.module
    interpreter, mark = home / "bin" / "python", home / "installed"
    wanted = "\n".join(program.packages)
    if mark.exists() and mark.read_text() == wanted:
        return str(interpreter), ""
    say(f"making {home} with {', '.join(program.packages)}")
    install = [str(interpreter), "-m", "pip", "install", "--quiet", *program.packages]
    for command in ([python, "-m", "venv", "--clear", str(home)], install):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
            return None, f"{' '.join(command[1:4])}: {' '.join(errors)[:600]}"
    mark.write_text(wanted)
    return str(interpreter), ""
