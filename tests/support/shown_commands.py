"""Whether a command that a page shows is one: its program, its options, its keys and its files."""

import contextlib
import io
import re
import shlex
import tomllib
from pathlib import Path

from fedjax_bn import main
from fedjax_bn.run import listing
from fedjax_bn.run.config import assign, base
from fedjax_bn.run.config.defaults import KEYS
from fedjax_bn.run.config.file import read

ROOT = Path(__file__).parents[2]
PROGRAMS = r"(python|fedjax-bn|make|pip|sbatch|kubectl|launch/\S+)"
# What pages write for a reader's own words where only certain ones are allowed.
STAND_FOR = {"METHOD": "fedavg", "SEED": "0", "TARGET": "sketch"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
CONFIG = "CONFIG"  # in the lists of what there is
OTHERS = ("build", "sphinx", "pytest")  # of `python -m`


def commands(text: str) -> list[str]:
    """The commands of a page: lines of its blocks, and what stands in backticks."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += re.findall(r"`([^`\n]+)`", prose)
    return [line for line in lines if re.match(PROGRAMS + " ", line)]


def check(command: str) -> None:
    """Raises where the command is none, or names what there is not."""
    words = shlex.split(re.sub(r"\s#.*| >.*", "", command).replace("...", ""))
    words = [re.sub(r"\b[A-Z]{4,}\b", lambda m: STAND_FOR.get(m[0], m[0]), w) for w in words]
    program, rest = words[0], words[1:]
    if words[:2] == ["python", "-m"]:
        program, rest = words[2], words[3:]
    if program in ("fedjax-bn", "fedjax_bn", "fedjax_bn.main"):
        _check_ours(rest)
    elif program == "python" and rest[0] == "-c":
        compile(rest[1], command, "exec")
    elif program == "python":
        _check_script(*rest)
    elif "/" in program:
        _check_script(program, *rest)
    elif program == "make":
        assert rest[0] in TARGETS, f"the Makefile has no {rest[0]}"
    elif program == "pip":
        asked = re.findall(r"\[([\w,]+)\]", command)
        assert set(",".join(asked).split(",")) - {""} <= set(EXTRAS), "there is no such extra"
    elif program in ("sbatch", "kubectl"):
        files = [word for word in rest if word.startswith("launch/")]
        assert files, f"{program} is given no file of launch/"
        assert all((ROOT / file).is_file() for file in files), f"one of {files} is not there"
    else:
        assert program in OTHERS, f"{program} is not known"


def _check_ours(words: list[str]) -> None:
    """A command of the library: what is listed, or a configuration with its changes."""
    if words[:1] == ["list"]:
        assert {*words[1].split("|")} <= {*listing.LISTS, "..."}, f"nothing lists {words[1]}"
        return
    if CONFIG in words:
        return
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            options, changes = main.parse(["fedjax-bn", *words])
        except SystemExit:
            assert "are required" in said.getvalue(), said.getvalue()  # a page names a flag alone
            return
    if options.command in ("train", "config", "evaluate"):
        config = read(options.config) if options.config else base()
        for key, text in changes:
            assign(config, key, text)


def _check_script(path: str, *words: str) -> None:
    """A script of the checkout, with options that it or a module beside it knows."""
    file = ROOT / path
    file = file / "__main__.py" if file.is_dir() else file
    assert file.is_file(), f"there is no {path}"
    known = "".join(beside.read_text() for beside in file.parent.glob("*.*") if beside.is_file())
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--config."):
            assert name[9:] in KEYS, f"{name} is no key"
        elif name.startswith("--") and name != "--config" and not name.startswith("--data."):
            stated = rf"""["' |]{name}\b|DEFINE_\w+\(\s*"{name[2:]}\""""
            assert re.search(stated, known), f"{path} has no option {name}"
