"""How Sphinx builds these pages: `make docs`."""

import re
import shutil
import sys
from functools import partial
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import api_pages  # noqa: E402
import docstrings  # noqa: E402
import maths  # noqa: E402

import fedjax_bn  # noqa: E402

project = "fedjax_bn"
author = copyright = "The fedjax_bn authors"
version = release = fedjax_bn.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"fedjax_bn {release}"
html_math_renderer = "mathml"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]

# A heading of a page can be linked to as `page.md#its-words`, and a wrong one is an error.
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # tests/house/test_notebooks.py executes them

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "code"
highlight_language = "bash"  # a fence without a language holds commands; API pages say otherwise
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Napoleon links the names of attributes; one that several classes have, such as `param_dtype`, has
# no target of its own.
suppress_warnings = ["ref.python"]
toc_object_entries_show_parents = "hide"

# What is written elsewhere in the checkout, or read out of the code, becomes pages here.
COPIES = {
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "benchmarks/README.md": "benchmarks",
    "launch/README.md": "launching",
}


def make_pages(app: object) -> None:
    """Writes the pages that are made from other files into docs/generated, which git ignores."""
    built = DOCS / "generated"
    shutil.rmtree(built, ignore_errors=True)
    (built / "notebooks").mkdir(parents=True)
    for source, name in COPIES.items():
        text = (ROOT / source).read_text()
        folder = (ROOT / source).parent
        text = re.sub(r"\[([^\]]*)\]\(([^)#:]+)\)", partial(link, folder), text)
        (built / f"{name}.md").write_text(text)
    names = [path.stem for path in sorted((ROOT / "colab").glob("*.ipynb"))]
    for name in names:
        shutil.copy(ROOT / "colab" / f"{name}.ipynb", built / "notebooks")
    (built / "notebooks" / "index.md").write_text(
        "# Notebooks\n\nFor Google Colab, in `colab/`.\n\n```{toctree}\n"
        + "\n".join(names)
        + "\n```\n"
    )
    api_pages.write(built / "api")


def link(folder: Path, match: re.Match) -> str:
    """A link of a copied page in `folder`: to the page of the same file, or text without one."""
    text, target = match.groups()
    path = (folder / target).resolve()
    if path.is_relative_to(DOCS):
        return f"[{text}](../{path.relative_to(DOCS)})"
    copy = COPIES.get(str(path.relative_to(ROOT)))
    return f"[{text}]({copy}.md)" if copy else f"{text} (`{target}`)"


def skip_member(app: object, kind: str, name: str, thing: object, skip: bool, options: object):
    """Leaves out a NamedTuple's fields, which its signature and its own words name."""
    return True if "Alias for field number" in (getattr(thing, "__doc__", "") or "") else None


def setup(app: object) -> None:
    """Called by Sphinx."""
    maths.setup(app)
    app.connect("builder-inited", make_pages)
    app.connect("autodoc-process-docstring", docstrings.process, priority=400)
    app.connect("autodoc-skip-member", skip_member)
