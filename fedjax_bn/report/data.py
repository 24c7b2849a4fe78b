"""The data of a run: data.json, with the samples of each class, and a report's section on it."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_bn.data import label_trees
from fedjax_bn.data.domain import Dataset, Domain, Split, splits
from fedjax_bn.report.finished_runs import Run, Variant
from fedjax_bn.report.html_parts import heat_map, joined, paragraphs, picture
from fedjax_bn.run.evaluation.groups import some_of
from fedjax_bn.run.training.records import Record

_MOST_CLASSES = 40  # with a column of their own in the table of counts
_PICTURES = {
    "samples": "What the clients see",
    "boxes": "Boxes found in test images, and those missed",
    "masked_features": "Features of two clients, before and after their masks",
}


def data_facts(internal: Dataset, unseen: Sequence[Domain], most: int = 100) -> Record:
    """Returns the content of data.json.

    Args:
      internal: the clients.
      unseen: the domains without a client; all of their samples are tested.
      most: clients that are listed, evenly spaced if there are more.

    Returns:
      {"classes": names, "clients": {client: {split: counts}}, "unseen": {domain: {"test": counts}},
      "boxes": whether classes are of boxes, "number": of clients}, where counts are {"samples": n,
      "classes": how many of each}.
    """

    def counts(parts: Sequence[Split]) -> Record:
        parts = {id(part): part for part in parts}.values()  # an unseen domain may repeat one
        each = sum(label_trees.class_counts(part.labels, number) for part in parts)
        samples = sum(len(part.images) for part in parts)
        return {"samples": samples, "classes": [int(count) for count in each]}

    number = internal.num_classes
    shown = [internal.domains[k] for k in some_of(len(internal.domains), most)]
    return {
        "classes": list(internal.classes or map(str, range(number))),
        "clients": {
            domain.name: {name: counts([split]) for name, split in splits(domain)}
            for domain in shown
        },
        "unseen": {
            domain.name: {"test": counts([split for _, split in splits(domain)])}
            for domain in unseen
        },
        "boxes": label_trees.has_boxes(internal.domains[0].train.labels),
        "number": len(internal.domains),
    }


def other_samples(data: Record, planned: Mapping[str, int]) -> dict[str, int]:
    """Returns domain -> training samples of a client, where they are not as many as planned.

    Counts that differ by rounding, by one sample or two in a thousand, are alike.

    Args:
      data: data.json; empty for a run that has none, whose samples are unknown.
      planned: domain -> training samples of each of its clients; others may have any number.
    """
    found: dict[str, int] = {}
    for client, parts in data.get("clients", {}).items():
        domain, count = client.partition("/")[0], parts["train"]["samples"]
        wanted = planned.get(domain, count)
        if abs(count - wanted) > max(1, wanted // 500):
            found[domain] = count
    return found


def data_section(variants: Sequence[Variant]) -> str:
    """Returns pictures of the first run's data, and its class counts with names, as HTML."""
    run = variants[0].runs[0]
    plots = run.folder / "plots"
    pictures = [picture(plots / f"{name}.png", text) for name, text in _PICTURES.items()]
    counts = _class_counts(run)
    if not counts:  # a version before 0.2 wrote no data.json
        counts = picture(plots / "class_counts.png", "Training samples by class and client")
    return joined(*pictures, counts)


def _class_counts(run: Run) -> str:
    """Tables of training, validation and test samples: a row a client and a column a class."""
    if not (data := run.data):
        return ""
    what = "boxes" if data["boxes"] else "samples"
    parts = [f"<h3>{what.capitalize()} by class and client</h3>"]
    if len(data["clients"]) < data["number"]:
        few = f"{len(data['clients'])} of {data['number']:,} clients."
        parts.append(paragraphs([few], "soft"))
    named = data["clients"] | {f"{name} (unseen)": one for name, one in data["unseen"].items()}
    for split in ("train", "validation", "test"):
        rows = {name: one[split]["classes"] for name, one in named.items() if split in one}
        if rows:
            heads, counts = data["classes"], np.array(list(rows.values()), float)
            if len(heads) > _MOST_CLASSES:
                heads = [f"least of {len(heads)} classes", "median", "most"]
                counts = np.stack([counts.min(1), np.median(counts, 1), counts.max(1)], axis=1)
            parts.append(heat_map(f"{split}: {what}", list(rows), heads, counts, ".0f"))
    return "\n".join(parts)
