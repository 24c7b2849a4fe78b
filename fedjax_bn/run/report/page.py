"""report.html: one page with the tables and plots of a run, no other file needed to read it."""

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path

from fedjax_bn.data.domain import Dataset, Domain
from fedjax_bn.names import on_page
from fedjax_bn.run.forms import CLAIM, SUMMARY
from fedjax_bn.run.groups import some_of
from fedjax_bn.run.records import Record
from fedjax_bn.run.report import plots, tables
from fedjax_bn.run.report.unseen import ablations
from fedjax_bn.run.workdir import read_json, read_lines, write_atomically

_MOST_SAMPLED = 40  # clients of which images, and names in the configuration, are shown
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto }}
pre {{ background: #f5f5f2; padding: 1rem; overflow-x: auto; font-size: 13px }}
img {{ max-width: 100%; height: auto }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def write_report(folder: Path) -> None:
    """Writes plots/*.png and report.html of a finished run, its finished baselines beside it.

    Raises:
      WorkdirError: the folder holds no finished run.
    """
    summary = read_json(folder / "summary.json", SUMMARY)
    records = read_lines(folder / "metrics.jsonl", summary["rounds"])
    summaries = [summary, *_baselines(folder)]
    drawn = {
        "methods": plots.methods(summaries),
        "accuracy": plots.curves(records, "accuracy", f"test {tables.score_of(summary)}, %"),
        "loss": plots.curves(records, "loss", "training loss"),
        "weights": plots.curves(records, "weights", "aggregation weight"),
    }
    unseen_scores = summary["accuracy"]["unseen"]
    drawn |= {f"unseen{name.removesuffix('.png')}": i for name, i in ablations(unseen_scores)}
    if "mask_l1" in records[-1]:
        drawn["mask_l1"] = plots.curves(records, "mask_l1", "L1 norm of the mask")
    for name, image in drawn.items():
        write_atomically(folder / "plots" / f"{name}.png", image)
    write_atomically(folder / "report.html", _page(folder, summary, summaries, list(drawn)))


def write_data_plots(folder: Path, internal: Dataset, unseen: Sequence[Domain]) -> None:
    """Writes plots of what clients see, and of how many samples of each class they own.

    Of many clients some are shown, evenly spaced.
    """
    shown = [internal.domains[k] for k in some_of(len(internal.domains), _MOST_SAMPLED)]
    images = plots.samples([*shown, *unseen])
    write_atomically(folder / "plots" / "samples.png", images)
    write_atomically(folder / "plots" / "class_counts.png", plots.class_counts(internal))


def _baselines(folder: Path) -> list[Record]:
    """The summaries of the finished baselines of a run."""
    return [read_json(path, SUMMARY) for path in sorted(folder.glob("baselines/*/summary.json"))]


def _page(folder: Path, summary: Record, summaries: list[Record], drawn: list[str]) -> str:
    """The page as HTML, with the plots that were drawn and those of the data, and no others."""
    title = f"{summary['method']} on {summary['dataset']}, seed {summary['seed']}"
    facts = (
        f"{summary['rounds']} rounds, accuracies of round {summary['selected_round']}; "
        f"{summary['seconds_per_round']:.3g} s a round (median), "
        f"{summary['samples_per_second']:,.0f} training samples a second, "
        f"compiled in {summary['compile_seconds']:.3g} s"
    )
    notes = read_json(folder / "config.json", CLAIM).get("notes", [])
    parts = [f"<p>{on_page(text)}</p>" for text in (facts, *notes)]
    parts.append(_preformatted(tables.comparison(summaries)))
    score = tables.score_of(summary)
    captions = {
        "methods": f"Test {score} by client",
        "accuracy": f"Test {score} over rounds",
        "loss": "Training loss over rounds",
        "weights": "Aggregation weights over rounds",
        "mask_l1": "L1 norm of the clients' masks over rounds",
        "masked_features": "Features of two clients, before and behind their masks",
        "boxes": "Boxes found in test images, and those missed",
        "samples": "What the clients see",
        "class_counts": "Training samples by class and client",
    }
    for name in drawn:
        captions.setdefault(name, f"Unseen clients: {name.removeprefix('unseen-')}")
    for name, caption in captions.items():
        path = folder / "plots" / f"{name}.png"
        if path.exists():
            data = base64.b64encode(path.read_bytes()).decode()
            text = on_page(caption)
            parts.append(f'<h2>{text}</h2><img alt="{text}" src="data:image/png;base64,{data}">')
    config = _shortened(read_json(folder / "config.json", CLAIM))
    parts.append(f"<h2>Configuration</h2>{_preformatted(config)}")
    return _PAGE.format(title=on_page(title), body="\n".join(parts))


def _shortened(about: Record) -> str:
    """The content of config.json, with the first and last names only of many clients."""
    form = about.get("form")
    names = form.get("clients") if isinstance(form, dict) else None
    if isinstance(names, list) and len(names) > _MOST_SAMPLED:
        names = [names[0], f"... {len(names) - 2} others ...", names[-1]]
        about = about | {"form": form | {"clients": names}}
    return json.dumps(about, indent=2)


def _preformatted(text: str) -> str:
    """Text as an HTML block that keeps its columns."""
    return f"<pre>{html.escape(text)}</pre>"
