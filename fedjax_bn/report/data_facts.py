"""data.json: how many samples of each class the clients and the unseen domains of a run have."""

from collections.abc import Mapping, Sequence

from fedjax_bn.data import label_trees
from fedjax_bn.data.domain import Dataset, Domain, Split, splits
from fedjax_bn.run.evaluation.groups import some_of
from fedjax_bn.run.training.records import Record


def data_facts(internal: Dataset, unseen: Sequence[Domain], most: int = 100) -> Record:
    """What a report tells of the data, as JSON.

    Args:
      internal: the clients.
      unseen: the domains that train nobody; all of their samples are tested.
      most: of more clients some are told of, evenly spaced.

    Returns:
      {"classes": names, "clients": {client: {split: counts}}, "unseen": {domain: {"test": counts}},
      "boxes": whether classes are of boxes, "number": of clients}, where counts are {"samples": n,
      "classes": how many of each}.
    """
    number = internal.num_classes
    shown = [internal.domains[k] for k in some_of(len(internal.domains), most)]
    return {
        "classes": list(internal.classes or map(str, range(number))),
        "clients": {
            domain.name: {name: _counts([split], number) for name, split in splits(domain)}
            for domain in shown
        },
        "unseen": {
            domain.name: {"test": _counts([split for _, split in splits(domain)], number)}
            for domain in unseen
        },
        "boxes": label_trees.has_boxes(internal.domains[0].train.labels),
        "number": len(internal.domains),
    }


def other_samples(data: Record, planned: Mapping[str, int]) -> dict[str, int]:
    """Returns domain -> training samples of a client, where they are not as many as planned.

    Counts that differ by rounding, by one sample or two in a thousand, are alike.

    Args:
      data: data.json; empty of a run that has none, of which nothing is known.
      planned: domain -> training samples of each of its clients; of others any number is right.
    """
    found: dict[str, int] = {}
    for client, parts in data.get("clients", {}).items():
        domain, count = client.partition("/")[0], parts["train"]["samples"]
        wanted = planned.get(domain, count)
        if abs(count - wanted) > max(1, wanted // 500):
            found[domain] = count
    return found


def _counts(parts: Sequence[Split], classes: int) -> Record:
    """Of splits together; one that is there twice, as of an unseen domain, counts once."""
    parts = {id(part): part for part in parts}.values()
    counts = sum(label_trees.class_counts(part.labels, classes) for part in parts)
    return {
        "samples": sum(len(part.images) for part in parts),
        "classes": [int(count) for count in counts],
    }
