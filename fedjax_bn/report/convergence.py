"""Curves over rounds: of every variant, client, unseen domain and adaptation, as HTML."""

from collections.abc import Callable, Sequence
from functools import partial

from fedjax_bn.report import html_parts
from fedjax_bn.report.charts import Line, Look, chart, key_of
from fedjax_bn.report.curves import Read, internal, lines_of, measure, unseen, varying_weights
from fedjax_bn.report.looks import coloured, looks_of
from fedjax_bn.report.measured import MEASURES
from fedjax_bn.report.results import Table
from fedjax_bn.report.scores import MEAN
from fedjax_bn.report.variants import Variant
from fedjax_bn.run.evaluation.groups import some_of

_MOST = 24  # charts of a section; of more columns some are shown, evenly spaced
Columns = dict[str, list[Line]]  # column -> a line a variant, perhaps an adaptation
Panels = dict[str, Columns]  # heading -> what it shows


def convergence(variants: Sequence[Variant], tables: Sequence[Table]) -> str:
    """Test scores, measures, losses, weights and masks over rounds.

    Args:
      variants: of one data set.
      tables: theirs; where there are many lines the best of these are coloured.
    """
    score = variants[0].runs[0].score
    inside = partial(_inside, variants)
    within, without = partial(_titled, tables[0]), partial(_titled, tables[-1])

    def by_client(name: str) -> Columns:
        return inside(measure(name) if name else internal("accuracy"))

    parts = (
        within("Test scores of internal clients", _scores(score, by_client)),
        without("Test scores of unseen domains", _scores(score, partial(_outside, variants))),
        within("Training loss", {"": inside(internal("loss"))}, True),
        within("Training loss after aggregation", {"": inside(internal("train_loss"))}, True),
        within("Aggregation weights, where they vary", {"": inside(varying_weights)}, True),
        within("L1 norm of the masks", {"": inside(internal("mask_l1"))}),
    )
    return "\n".join(filter(None, parts))


def _scores(score: str, columns_of: Callable[[str], Columns]) -> Panels:
    """A panel for the score, and one for each measure.

    Args:
      score: what its percentages are.
      columns_of: name of a measure, empty for the score -> its lines.
    """
    heads = {"": f"{score} %"} | {name: head for name, (head, _, _) in MEASURES.items()}
    return {head: columns_of(name) for name, head in heads.items()}


def _titled(table: Table, title: str, panels: Panels, folded: bool = False) -> str:
    """A section of panels that have lines, the clients of all but the first one on demand.

    Args:
      table: see `looks_of`.
      title: of the section.
      panels: heading -> lines.
      folded: whether clients of the first one are shown on demand too.
    """
    panels = {head: columns for head, columns in panels.items() if columns}
    lines = [line for columns in panels.values() for each in columns.values() for line in each]
    if not lines:
        return ""
    if all(len(line.x) < 2 for line in lines):
        note = html_parts.paragraphs(["One round was evaluated: there is no curve."], "soft")
        return f"<h3>{title}</h3>{note}"
    looks = looks_of({line.name: line.look.style for line in lines}, table)
    grids = [
        (head, _grid({c: coloured(each, looks) for c, each in columns.items()}, folded or i > 0))
        for i, (head, columns) in enumerate(panels.items())
    ]
    content = html_parts.panels(grids)
    return f'<section class="curves"><h3>{title}</h3>{key_of(looks)}{content}</section>'


def _grid(columns: Columns, folded: bool = False) -> str:
    """A chart a column, the mean in front.

    Args:
      columns: their lines.
      folded: whether columns other than the mean are shown on demand.
    """
    first = {MEAN: columns[MEAN]} if folded and MEAN in columns else {}
    rest = {c: columns[c] for c in sorted(columns, key=lambda c: c != MEAN) if c not in first}
    names = [list(rest)[i] for i in some_of(len(rest), _MOST)] if rest else []
    grid = _charts({name: rest[name] for name in names})
    if len(names) < len(rest):
        grid = html_parts.paragraphs([f"{len(names)} of {len(rest)} are shown."]) + grid
    if first and grid:
        grid = f"<details><summary>By client</summary>{grid}</details>"
    return _charts(first) + grid


def _charts(columns: Columns) -> str:
    drawn = "".join(chart(column, lines, "round") for column, lines in columns.items())
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _inside(variants: Sequence[Variant], read: Read) -> Columns:
    """The mean over a variant's seeds, from the least to the greatest."""
    found: Columns = {}
    for colour, one in enumerate(variants):
        runs = [read(run) for run in one.runs]
        for column, line in lines_of(one.label, Look((colour, 0)), runs):
            found.setdefault(column, []).append(line)
    return found


def _outside(variants: Sequence[Variant], name: str = "") -> Columns:
    """The same of unseen domains, a line a variant and adaptation."""
    found: Columns = {}
    dashes: dict[str, int] = {}
    for colour, one in enumerate(variants):
        runs = [unseen(run, name) for run in one.runs]
        for text in dict.fromkeys(text for rows in runs for text in rows):
            look = Look((colour, dashes.setdefault(text, len(dashes))))
            values = [rows.get(text, []) for rows in runs]
            for column, line in lines_of(f"{one.label} [{text}]", look, values):
                found.setdefault(column, []).append(line)
    return found
