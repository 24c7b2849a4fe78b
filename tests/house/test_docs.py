"""What README and the pages of docs/ show: Python runs, commands parse, links lead somewhere."""

import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib

import jax
import pytest

import fedjax_bn
import runs
from fedjax_bn import main
from fedjax_bn.arguments.errors import UserError
from fedjax_bn.run import listing
from fedjax_bn.run.config import assign, base
from fedjax_bn.run.config.defaults import KEYS
from fedjax_bn.run.config.file import read

sys.path.append(str(runs.ROOT / "docs"))
import api_pages

PROGRAMS = r"(python|fedjax-bn|make|pip|sbatch|kubectl|launch/\S+)"
# What pages write for a reader's own words where only certain ones are allowed.
STAND_FOR = {"METHOD": "fedavg", "SEED": "0", "TARGET": "sketch"}
PROJECT = tomllib.loads((runs.ROOT / "pyproject.toml").read_text())["project"]
TARGETS = re.findall(r"^([\w-]+):", (runs.ROOT / "Makefile").read_text(), re.MULTILINE)
CONFIG = "CONFIG"  # in the lists of what there is
OTHERS = ("build", "sphinx", "pytest")  # of `python -m`


def commands_of(text: str) -> list[str]:
    """The commands of a page: lines of its blocks, and what stands in backticks."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += re.findall(r"`([^`\n]+)`", prose)
    return [line for line in lines if re.match(PROGRAMS + " ", line)]


def check_command(command: str) -> None:
    """Raises where the command is none, or names what there is not."""
    words = shlex.split(re.sub(r"\s#.*| >.*", "", command).replace("...", ""))
    words = [re.sub(r"\b[A-Z]{4,}\b", lambda m: STAND_FOR.get(m[0], m[0]), w) for w in words]
    program, rest = words[0], words[1:]
    if words[:2] == ["python", "-m"]:
        program, rest = words[2], words[3:]
    if program in ("fedjax-bn", "fedjax_bn", "fedjax_bn.main"):
        check_ours(rest)
    elif program == "python" and rest[0] == "-c":
        compile(rest[1], command, "exec")
    elif program == "python":
        check_script(*rest)
    elif "/" in program:
        check_script(program, *rest)
    elif program == "make":
        assert rest[0] in TARGETS, f"the Makefile has no {rest[0]}"
    elif program == "pip":
        asked = re.findall(r"\[([\w,]+)\]", command)
        assert set(",".join(asked).split(",")) - {""} <= set(PROJECT["optional-dependencies"]), (
            "there is no such extra"
        )
    elif program in ("sbatch", "kubectl"):
        files = [word for word in rest if word.startswith("launch/")]
        assert files, f"{program} is given no file of launch/"
        assert all((runs.ROOT / file).is_file() for file in files), f"one of {files} is not there"
    else:
        assert program in OTHERS, f"{program} is not known"


def check_ours(words: list[str]) -> None:
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


def check_script(path: str, *words: str) -> None:
    """A script of the checkout, with options that it or a module beside it knows."""
    file = runs.ROOT / path
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


WRITTEN = [*runs.ROOT.glob("*.md"), *runs.ROOT.glob("*/README.md"), *runs.ROOT.glob("docs/**/*.md")]
PAGES = {
    str(page.relative_to(runs.ROOT)): page.read_text()
    for page in sorted(WRITTEN)
    if not {"generated", "_build"} & set(page.parts) and page.name != "CHANGELOG.md"
}
BLOCKS = {name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in PAGES.items()}
SHOWN = [(name, command) for name, text in PAGES.items() for command in commands_of(text)]
# Pages whose programs take longer to compile than the default run has.
HOWTO = ("deploy", "feature_term", "many_devices", "own_metric", "own_model", "train_a_part")
HOWTO += ("unseen_client", "use_model")
LONG = {"docs/tutorial.md", "docs/index.md", "docs/python.md"}
LONG |= {f"docs/howto/{name}.md" for name in HOWTO}
SMALLER = {"SmallCNN(2, widths=(4, 4, 4))": "MLP(2)", "SmallCNN(widths=(4, 4, 4))": "MLP(10)"}
SMALLER |= {"SmallCNN()": "MLP(10)", "models import SmallCNN": "models import MLP"}
SMALLER |= {"DigitCNN": "SmallCNN", "rounds=20": "rounds=1", "rounds=30": "rounds=1"}
PYTHON = [
    pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
    for name, blocks in BLOCKS.items()
    if blocks and name != "README.md"
]


def run_small(code: str, page: str, names: dict) -> None:
    """With smaller networks and fewer rounds, and the promotion that a reader's own code has."""
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(code, page, "exec"), names)


@pytest.mark.parametrize("page", PYTHON)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in BLOCKS[page]:
        run_small(block, page, names)


def test_every_command_of_every_page_is_understood():
    assert len(SHOWN) > 100
    wrong = []
    for page, command in SHOWN:
        try:
            check_command(command)
        except Exception as error:
            wrong.append(f"{page}: {command}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "command", ["fedjax-bn --config quickstrat", "python launch/sweeps/fedbm.py", "make quickstrat"]
)
def test_a_command_that_does_not_exist_is_noticed(command):
    with pytest.raises((AssertionError, UserError)):
        check_command(command)


@pytest.mark.parametrize("page", PAGES)
def test_links_have_a_text_and_lead_to_what_exists(page):
    """A link without a text shows nothing on a plain Markdown viewer."""
    links = re.findall(r"\[([^\]]*)\]\((?!http)([^)#\s]*)(?:#[^)]*)?\)", PAGES[page])
    pages, folder = runs.ROOT / "docs", (runs.ROOT / page).parent
    paths = [(folder / path).resolve() for _, path in links if path and "generated/" not in path]
    assert all(text for text, _ in links)
    assert not [path for path in paths if not path.exists()]
    if page.startswith("docs/"):  # Sphinx builds no page of what is beside docs/
        assert not [path for path in paths if pages not in path.parents]


def test_every_public_name_is_in_the_api_pages():
    entries = list(api_pages.entries())
    documented = {(entry.module, entry.name) for entry in entries}
    assert len(documented) == len(entries)
    things = {id(getattr(importlib.import_module(m), n)) for m, n in documented}
    for found in pkgutil.walk_packages(fedjax_bn.__path__, "fedjax_bn."):
        if found.name.split(".")[1] not in fedjax_bn.__all__:
            continue
        module = importlib.import_module(found.name)
        for name, thing in inspect.getmembers(module):
            own = getattr(thing, "__module__", None) == module.__name__
            shown = name in getattr(module, "__all__", ()) and not inspect.ismodule(thing)
            if not name.startswith("_") and (own or shown) and callable(thing):
                assert id(thing) in things, f"{module.__name__}.{name}"


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("myst_nb", reason="the documentation needs `pip install '.[docs]'`")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(runs.ROOT)}
    built = subprocess.run(command, cwd=runs.ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for entry in api_pages.entries():
        page = tmp_path / "generated" / "api" / f"{api_pages.page_of(entry)}.html"
        assert f'id="{entry.module}.{entry.name}"' in page.read_text()
    assert "<math" in (tmp_path / "papers" / "fedbn.html").read_text()


(EXAMPLE,) = BLOCKS["README.md"]
TABLE = re.search(rf"{re.escape(EXAMPLE)}```\n\n```\n(.*?)```", PAGES["README.md"], re.DOTALL)[1]


def test_its_example_prints_a_table_of_the_form_that_is_shown(capsys):
    names = {}
    run_small(EXAMPLE, "README.md", names)
    printed, shown = capsys.readouterr().out.splitlines(), TABLE.splitlines()
    assert printed[:2] == shown[:2]
    assert len(printed) == len(shown) == 3
    accuracy = names["result"].accuracy
    assert printed[2].split()[1:] == [f"{number:.1f}" for number in accuracy["internal"].values()]
    images, labels = names["clients"]["flatbed"]["test"]
    right = 100 * (names["result"].predict(images, client="flatbed").argmax(1) == labels).mean()
    assert right == pytest.approx(accuracy["internal"]["flatbed"])


@pytest.mark.parametrize("page", ["docs/index.md", "docs/tutorial.md"])
def test_the_first_pages_of_the_documentation_show_the_same_example(page):
    assert EXAMPLE in BLOCKS[page]
    assert f"```\n{TABLE}```" in PAGES[page]
