"""The data of a run: data.json, with the samples of each class."""

from collections.abc import Mapping, Sequence

from fedjax_bn.data import label_trees
from fedjax_bn.data.domain import Dataset, Domain, Split, splits
from fedjax_bn.run.evaluation.groups import some_of
from fedjax_bn.run.training.records import Record


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
