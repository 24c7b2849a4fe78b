"""Pages of the API, read out of the code: every public name of each module that users import."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "fedjax_bn"
COMMON = {"PyTree", "Path"}  # aliases that say no more than their name
# The order of methods on their page; those that the papers compare with follow.
BY_PAPER = {
    "FedAvg and its local baselines": ("fedavg", "singleset", "silobn"),
    "FedBN": ("fedbn", "fedprox"),
    "FedIG-A": ("fedig", "fediga"),
    "FedCD": ("fedcd",),
    "UniFed": (
        *("scaffold", "fednova", "fedadam", "fedadagrad", "fedyogi", "fedavgm", "moon", "feddc"),
        "perfedavg",
    ),
}


class Module(NamedTuple):
    """What a file says of itself.

    name: dotted; own: the names it defines, with the directive of each; imported: those it takes
    from elsewhere, with the module; exported: those it shows as its own.
    """

    name: str
    own: dict[str, str]
    imported: dict[str, str]
    exported: tuple[str, ...]


class Entry(NamedTuple):
    """A public name at the place from which users import it, and Sphinx's directive for it."""

    module: str
    name: str
    directive: str


def read(path: Path) -> Module:
    """Reads a file without importing it."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    own, imported, exported = {}, {}, []
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.name: node.module for alias in node.names}
            exported += [alias.name for alias in node.names if alias.asname == alias.name]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own[node.name] = "autofunction" if isinstance(node, ast.FunctionDef) else "autoclass"
        for target in _targets(node):
            makes = getattr(getattr(node, "value", None), "func", None)
            own[target.id] = "autofunction" if getattr(makes, "id", "") == "variant" else "data"
            if target.id == "__all__":
                exported += ast.literal_eval(node.value)
    own = {name: kind for name, kind in own.items() if name[0] != "_" and name not in COMMON}
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, own, imported, tuple(exported))


def _targets(node: ast.stmt) -> list[ast.Name]:
    """The names that an assignment gives."""
    found = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return [target for target in found if isinstance(target, ast.Name)]


def entries() -> Iterator[Entry]:
    """Every public name once: where a package exports it, else where it is written."""
    every = {module.name: module for module in map(read, sorted(PACKAGE.rglob("*.py")))}
    face = every[PACKAGE.name].exported
    public = [module for module in every.values() if _top(module.name) in face]
    shown = set()
    for module in sorted(public, key=lambda module: module.name.count(".")):
        for name in module.exported:
            source = every.get(module.imported.get(name, module.name))
            if source and name in source.own:  # not a module
                shown.add((source.name, name))
                yield Entry(module.name, name, source.own[name])
        for name, directive in module.own.items():
            if (module.name, name) not in shown:
                yield Entry(module.name, name, directive)


def _top(name: str) -> str:
    """`methods` of `fedjax_bn.methods.fedavg`."""
    return name.split(".")[1] if "." in name else ""


def page_of(entry: Entry) -> str:
    """The page on which an entry stands: one a module at the top, in packages one a part."""
    parts = entry.module.split(".")[1:]
    deep = parts[0] in {"data"} and len(parts) > 2
    return ".".join(parts[:2] if deep else parts[:1])


def write(folder: Path) -> None:
    """Writes a page for each part of the library, and their table of contents."""
    folder.mkdir(parents=True)
    pages: dict[str, list[Entry]] = {}
    for entry in entries():
        pages.setdefault(page_of(entry), []).append(entry)
    for page, found in pages.items():
        (folder / f"{page}.rst").write_text("\n".join(_lines(page, found)))
    listed = "\n".join(f"   {page}" for page in sorted(pages))
    (folder / "index.rst").write_text(f"API\n===\n\n.. toctree::\n\n{listed}\n")


def _place(entry: Entry) -> tuple:
    """Where an entry stands on its page: methods by paper, everything else by module."""
    papers = [name for names in BY_PAPER.values() for name in names]
    number = papers.index(entry.name) if _paper(entry) in BY_PAPER else len(papers)
    return entry.module.count("."), number, entry.module


def _paper(entry: Entry) -> str:
    """The heading above a method; "" for everything else."""
    if entry.module != "fedjax_bn.methods":
        return ""
    groups = (title for title, names in BY_PAPER.items() if entry.name in names)
    return next(groups, "Methods that the papers compare with")


def _lines(page: str, found: list[Entry]) -> Iterator[str]:
    """One page as reStructuredText."""
    title = f"fedjax_bn.{page}"
    yield from (".. highlight:: default", "", title, "=" * len(title), "")
    names = {f"{entry.module}.{entry.name}" for entry in found}
    module = paper = None
    for entry in sorted(found, key=_place):
        if entry.module != module:
            module = entry.module
            if module != title:
                yield from (module, "-" * len(module), "")
            yield from (f".. automodule:: {module}", "   :no-members:")
            yield from ("   :no-index:", "") if module in names else ("",)
        if (group := _paper(entry)) and group != paper:
            paper = group
            yield from (group, "-" * len(group), "")
        if entry.directive == "data":
            yield from (f".. py:data:: {entry.name}", f"   :module: {entry.module}")
        else:
            yield f".. {entry.directive}:: {entry.module}::{entry.name}"
        yield from ("   :members:", "") if entry.directive == "autoclass" else ("",)
