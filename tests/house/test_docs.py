"""What README and the pages of docs/ show: Python runs, commands parse, links lead somewhere."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys

import jax
import pytest

import fedjax_bn
import runs
import shown_commands
from fedjax_bn.arguments.errors import UserError

sys.path.append(str(runs.ROOT / "docs"))
import api_pages

WRITTEN = [*runs.ROOT.glob("*.md"), *runs.ROOT.glob("*/README.md"), *runs.ROOT.glob("docs/**/*.md")]
PAGES = {
    str(page.relative_to(runs.ROOT)): page.read_text()
    for page in sorted(WRITTEN)
    if not {"generated", "_build"} & set(page.parts) and page.name != "CHANGELOG.md"
}
BLOCKS = {name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in PAGES.items()}
SHOWN = [
    (name, command) for name, text in PAGES.items() for command in shown_commands.commands(text)
]
# Pages whose programs take longer to compile than the default run has.
HOWTO = ("deploy", "feature_term", "many_devices", "own_model", "unseen_client", "use_model")
LONG = {"docs/tutorial.md", "docs/index.md", "docs/python.md"}
LONG |= {f"docs/howto/{name}.md" for name in HOWTO}
SMALLER = {"DigitCNN": "SmallCNN", "rounds=20": "rounds=1"}
PYTHON = [
    pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
    for name, blocks in BLOCKS.items()
    if blocks and name != "README.md"
]


@pytest.mark.parametrize("page", PYTHON)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """With smaller networks and fewer rounds."""
    monkeypatch.chdir(tmp_path)
    names = {}
    with jax.numpy_dtype_promotion("standard"):  # what a reader's own code has
        for block in BLOCKS[page]:
            for large, small in SMALLER.items():
                block = block.replace(large, small)
            exec(compile(block, page, "exec"), names)


def test_every_command_of_every_page_is_understood():
    assert len(SHOWN) > 100
    wrong = []
    for page, command in SHOWN:
        try:
            shown_commands.check(command)
        except Exception as error:
            wrong.append(f"{page}: {command}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "command", ["fedjax-bn --config quickstrat", "python launch/sweeps/fedbm.py", "make quickstrat"]
)
def test_a_command_that_does_not_exist_is_noticed(command):
    with pytest.raises((AssertionError, UserError)):
        shown_commands.check(command)


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
