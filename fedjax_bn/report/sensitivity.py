"""How scores depend on a setting: of an adaptation, or a key that runs were swept over; as HTML."""

from collections.abc import Mapping, Sequence

from fedjax_bn.adaptation.choice import varied
from fedjax_bn.report import html_parts
from fedjax_bn.report.charts import Line, Look, chart, key_of
from fedjax_bn.report.intervals import Interval, over_seeds
from fedjax_bn.report.results import Table
from fedjax_bn.report.scores import Scores, unseen_scores
from fedjax_bn.report.variants import Variant, spell

_LEAST = 3  # values of a key that make a curve
_WIDE = 16  # from the least to the greatest value, from which on the axis is logarithmic
Points = dict[float, Interval]


def sensitivity(variants: Sequence[Variant], tables: Sequence[Table]) -> str:
    """A chart for each setting that some adaptations, or some variants of a method, vary alone."""
    adapted, swept = _adapted(variants), _swept(variants, tables)
    return "\n".join(
        filter(
            None,
            (
                _charts("Settings of adaptations", adapted),
                _charts("Keys that the runs vary", swept),
                _choices(variants),
            ),
        )
    )


def _charts(title: str, curves: Mapping[tuple[str, str], Mapping[str, Points]]) -> str:
    """A chart for each (title, setting), a line for each name; one colour a name everywhere."""
    names = dict.fromkeys(name for lines in curves.values() for name in lines)
    looks = {name: Look((number, 0)) for number, name in enumerate(names)}
    drawn = []
    for (head, setting), lines in curves.items():
        made = [_line(name, looks[name], points) for name, points in lines.items()]
        drawn.append(chart(head, made, setting, _is_wide(made)))
    if not drawn:
        return ""
    charts = f'<div class="charts">{"".join(drawn)}</div>'
    return f'<section class="curves"><h3>{title}</h3>{key_of(looks)}{charts}</section>'


def _adapted(variants: Sequence[Variant]) -> dict[tuple[str, str], dict[str, Points]]:
    """(title, setting) -> variant -> points, of settings of adaptations that are numbers."""
    found: dict[tuple[str, str], dict[str, Points]] = {}
    for variant in variants:
        scores = unseen_scores(variant.runs)
        for (name, key), choices in varied(scores).items():
            texts = {float(v): text for v, text in choices.items() if _is_number(v)}
            if len(texts) < _LEAST:
                continue
            for domain in scores[next(iter(texts.values()))]:
                points = {v: _over(scores[t], domain) for v, t in sorted(texts.items())}
                lines = found.setdefault((f"{domain}: {key} of {name}", key), {})
                lines[variant.label] = {v: one for v, one in points.items() if one}
    return found


def _over(scores: Scores, domain: str) -> Interval | None:
    """The mean over seeds of a domain; None where it has none."""
    seeds = scores.get(domain, {})
    return over_seeds([score.value for score in seeds.values()]) if seeds else None


def _swept(
    variants: Sequence[Variant], tables: Sequence[Table]
) -> dict[tuple[str, str], dict[str, Points]]:
    """(title, key) -> the other keys' choice -> points, of keys that are numbers."""
    found: dict[tuple[str, str], dict[str, Points]] = {}
    for table in tables:
        column = table.columns[0]
        for key in dict.fromkeys(key for variant in variants for key in variant.keys):
            lines: dict[str, Points] = {}
            for variant in variants:
                config = variant.runs[0].config
                if key not in variant.keys or not _is_number(config[key]):
                    continue
                others = [f"{k}={spell(config[k])}" for k in variant.keys if k != key]
                for row in table.rows:
                    if row.variant == variant.label and column in row.cells:
                        name = " ".join(filter(None, (variant.method, *others, row.adaptation)))
                        points = lines.setdefault(name, {})
                        points[float(config[key])] = row.cells[column].value
            lines = {n: dict(sorted(p.items())) for n, p in lines.items() if len(p) >= _LEAST}
            if lines:
                found[f"{table.name} {column} over {key}", key] = lines
    return found


def _choices(variants: Sequence[Variant]) -> str:
    """A table of settings that are no numbers, such as with and without affine."""
    rows = []
    for variant in variants:
        scores = unseen_scores(variant.runs)
        for (name, key), choices in varied(scores).items():
            for value, text in choices.items():
                for domain in scores[text] if not _is_number(value) else ():
                    mean = f"{_over(scores[text], domain).mean:.1f}"
                    told = (variant.label, name, key, value, domain, mean)
                    rows.append([html_parts.cell(one) for one in told])
    if not rows:
        return ""
    heads = ("run", "adaptation", "setting", "value", "domain", "%")
    return html_parts.sortable("Settings of adaptations that are no numbers.", heads, rows)


def _line(name: str, look: Look, points: Points) -> Line:
    values = list(points.values())
    known = all(value.known for value in values)
    ends = ([v.low for v in values], [v.high for v in values]) if known else ((), ())
    return Line(name, look, list(points), [v.mean for v in values], *ends)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_wide(lines: Sequence[Line]) -> bool:
    places = [x for line in lines for x in line.x]
    return bool(places) and min(places) > 0 and max(places) >= _WIDE * min(places)
