"""What the papers' tables are of: domains, settings, and the packaged configs that state them.

Reports find here what stands beside a run; `launch/sweeps` makes the runs of the same tables.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from fedjax_bn.data.corruptions import EXTRA, TYPES
from fedjax_bn.report.published import DOMAINS, LETTERS
from fedjax_bn.report.scores import MEAN, RUNNING

WEIGHTS = "weights of ImageNet"
UNSTATED = "unstated"


class PublishedTable(NamedTuple):
    """A published table, or one setting of a table, with its protocol.

    Attributes:
      table: "internal" or "unseen", the table of a report that it stands beside.
      dataset: here.
      config: the packaged config, perhaps with changes behind a colon.
      where: fields of its cells.
      columns: domain here -> heading there.
      adapted: adaptation here -> what it adds to the name of a row there; others have no row.
      renamed: what rows are called there, where it is not what most papers call them.
      start: from what it trains: empty for random weights, WEIGHTS, or UNSTATED.
      target: the domains left out there; None where each is in turn.
    """

    table: str
    dataset: str
    config: str
    where: Mapping[str, str]
    columns: Mapping[str, str]
    adapted: Mapping[str, str]
    renamed: Mapping[str, str] = {}
    start: str = ""
    target: str | None = None

    @property
    def paper(self) -> str:
        """Its paper."""
        return self.where["paper"]

    @property
    def name(self) -> str:
        """Paper, table, and the setting where the table has several."""
        setting = self.where.get("setting")
        return f"{self.paper}, Table {self.where['table']}" + (f" ({setting})" if setting else "")

    @property
    def metric(self) -> str:
        """What its percentages are, as a report's table calls it."""
        return "mAP50" if self.dataset in ("driving", "bdd100k") else "accuracy"


# FedBN's Tables 13 to 16
BATCHES = {"10": 10, "50": 50, "full": 743}
PERCENTS = (100, 60, 40, 20, 10, 5, 1)
STEPS = {10: 1223, 100: 12224}  # of 32 samples in an epoch of SynthDigits, the largest
OWN = "+client-specific BN"  # behind a method's name in UniFed's tables
UNIFED = ("FedAvg", "Scaffold", "FedProx", "FedAdam", "FedNova", "MOON", "FedDC", "PerFedAvg")
NEVER_UPDATED = {  # rows of UniFed's Table 3 whose global batch norms are never updated
    "FedBN": "initial:affine=False",
    f"FedBN{OWN}": "tsmobn:affine=False",
}
INFERENCE = {  # rows of FedIG's Table 3c -> adaptation
    "FedIG + ensemble BNs": "ensemble",
    "FedIG + IABN": "iabn",
    "FedIG + MixNorm": "mixnorm",
    "FedIG + random alpha": "random_alpha",
    "FedIG + fixed alpha 0.5": "fixed_alpha",
}
_PLAIN = {"": "", RUNNING: ""}
_ADAPTER = _PLAIN | {"zero_shot_adapter": "-A"}
_TSMOBN = _PLAIN | {"tsmobn": "+TsmoBN"}
_INFERENCE = _PLAIN | {text: row.removeprefix("FedIG") for row, text in INFERENCE.items()}


def epochs(count: int) -> dict[str, int]:
    """Returns the keys of FedBN's E local epochs: 300 epochs in all, the rounds rounded up."""
    return {"local_epochs": count, "rounds": math.ceil(300 / count)}


def _columns(dataset: str, average: bool = False) -> dict[str, str]:
    """Returns domain here -> heading, and the heading of the mean where tables print one."""
    found = {domain: heading for heading, domain in DOMAINS[dataset].items()}
    return found | ({MEAN: "Avg"} if average else {})


def _of(paper: str, table: str, dataset: str, setting: str = "") -> dict[str, str]:
    where = {"paper": paper, "table": table, "dataset": dataset, "setting": setting}
    return {field: value for field, value in where.items() if value}


def _fedbn(
    table: str,
    setting: str = "",
    changes: str = "",
    dataset: str = "digits",
    printed: str = "Digits-Five",
) -> PublishedTable:
    """A table of FedBN's, whose clients all train."""
    where, config = _of("FedBN", table, printed, setting), f"{dataset}:{changes}".rstrip(":")
    columns = _columns(dataset)
    return PublishedTable("internal", dataset, config, where, columns, _PLAIN, target="")


def _fedbn_of_digits() -> list[PublishedTable]:
    """Tables 11 and 13 to 16."""
    by_batch = [
        _fedbn(
            "13",
            f"B={name}, E={count}",
            ",".join(f"{key}={n}" for key, n in {"batch_size": size, **epochs(count)}.items()),
        )
        for name, size in BATCHES.items()
        for count in (1, 4, 16)
    ]
    by_percent = [
        _fedbn("14", f"data fraction {percent}%", f"data.fraction={percent / 100}")
        for percent in PERCENTS
        if percent != 10  # of which Table 11 has the numbers
    ]
    unequal = [
        _fedbn(
            table,
            f"unequal sizes, {percent}%",
            f"data.truncate=False,data.fraction={percent / 100},local_steps={STEPS[percent]}",
        )
        for table, percent in (("15", 10), ("16", 100))
    ]
    return [_fedbn("11"), *by_batch, *by_percent, *unequal]


def _fedbn_of_all_digits() -> list[PublishedTable]:
    """Tables 12 and 17: one client with all samples, and two unseen kinds of MNIST.

    In Table 17 FedBN has statistics of test batches, the others the running ones.
    """
    pooled = "digits:data.partition=pooled"
    columns = _columns("digits_morpho")
    target = ",".join(columns)
    morpho = f"digits:data.name=digits_morpho,target='{target}'"
    adapted = {"FedBN": {"batch:batch_size=1000": ""}, "FedAvg": _PLAIN, "FedProx": _PLAIN}
    return [
        PublishedTable(
            "unseen",
            "digits",
            pooled,
            _of("FedBN", "12", "Digits-Five"),
            _columns("digits"),
            _PLAIN,
        ),
        *(
            PublishedTable(
                *("unseen", "digits_morpho", morpho),
                _of("FedBN", "17", "Morpho-MNIST") | {"method": name},
                *(columns, ends),
                target=target,
            )
            for name, ends in adapted.items()
        ),
    ]


def _tsmobn(table: str, dataset: str, printed: str, changes: str = "") -> PublishedTable:
    """A table of TsmoBN's."""
    where, config = _of("TsmoBN", table, printed), f"{dataset}:{changes}".rstrip(":")
    start = WEIGHTS if dataset == "cifar10_c" else ""
    return PublishedTable("unseen", dataset, config, where, _columns(dataset), _TSMOBN, start=start)


def _tsmobn_of_extras() -> list[PublishedTable]:
    """Tables E.11 to E.13: four more corruptions, tested where one type was left out."""
    printed, columns = (
        "CIFAR-10-C (severity 1), four extra corruptions",
        {one: one for one in EXTRA},
    )
    first = {"noise": "E.11", "blur": "E.11", "weather": "E.12", "digital": "E.12"}
    config = "cifar10_c:data.corruptions="
    return [
        PublishedTable(
            *("unseen", "cifar10_c", config),
            _of("TsmoBN", table, printed, f"trained with {kind} left out"),
            *(columns, _TSMOBN),
            start=WEIGHTS,
            target=f"{kind},extra",
        )
        for kind in TYPES
        if kind in first
        for table in (first[kind], "E.13")
    ]


def _unifed() -> list[PublishedTable]:
    """Tables 2 and 3: with and without batch norm of the client's own, inside and outside.

    Table 3's FedBN has a global model whose batch norms are not updated (section 4.1.3).
    """
    where = _of("UniFed", "3", "CIFAR-10-C")
    served, columns = _PLAIN | {"tsmobn": OWN}, _columns("cifar10_c")
    kept = {"FedBN": f"FedAvg{OWN}"} | {f"FedBN + {name}": f"{name}{OWN}" for name in UNIFED}
    inside_columns = {domain: letter for letter, domain in LETTERS.items()}
    inside = "cifar10_c:target=,data.validation=0.1,data.test=0.2,patience=0"
    return [
        PublishedTable(
            *("internal", "cifar10_c", inside, _of("UniFed", "2", "CIFAR-10-C")),
            *(inside_columns, _PLAIN, kept, WEIGHTS, ""),
        ),
        PublishedTable(
            *("unseen", "cifar10_c", "cifar10_c:patience=0", where),
            *(columns, served, {"FedBN": "its mean batch norm: no row"}, WEIGHTS),
        ),
        *(
            PublishedTable(
                *("unseen", "cifar10_c", "cifar10_c:patience=0", where | {"method": row}),
                *(columns, {adaptation: row.removeprefix("FedBN")}, {}, WEIGHTS),
            )
            for row, adaptation in NEVER_UPDATED.items()
        ),
    ]


def _fedig() -> list[PublishedTable]:
    """Tables 1 to 3 and 5 to 11; of Table 12 no client's mean over targets is in a report."""
    many = {
        "9": ("iid labels", ""),
        "10": ("Dirichlet 0.5", ":data.partition=dirichlet,data.alpha=0.5"),
        "11": ("Dirichlet 0.1", ":data.partition=dirichlet,data.alpha=0.1"),
    }
    pacs, vlcs, home = (_columns(name, True) for name in ("pacs", "vlcs", "officehome"))
    tables = [
        ("pacs", "pacs", _of("FedIG-A", "5", "PACS"), pacs, _ADAPTER),
        ("pacs", "pacs", _of("FedIG-A", "3", "PACS"), pacs, _INFERENCE),
        ("vlcs", "vlcs", _of("FedIG-A", "7", "VLCS"), vlcs, _ADAPTER),
        ("officehome", "officehome", _of("FedIG-A", "8", "OfficeHome"), home, _ADAPTER),
    ]
    average, ranges = {MEAN: "Avg"}, ("u ~ U(0.0, 0.5)", "u ~ U(0.5, 1.0)", "u ~ U(-0.1, 1.1)")
    uniform = {"FedIG": "FedIG-A, u ~ U(0, 1)"} | {name: f"FedIG-A, {name}" for name in ranges}
    for number in ("1", "2"):
        tables.append(("pacs", "pacs", _of("FedIG-A", number, "PACS"), average, _PLAIN))
    for dataset, printed, columns in (("pacs", "PACS", pacs), ("vlcs", "VLCS", average)):
        where = _of("FedIG-A", "6", printed)
        adapted = {"zero_shot_adapter": ""}
        tables.append((dataset, dataset, where, columns, adapted, uniform))
    for number, (setting, changes) in many.items():
        where = _of("FedIG-A", number, "PACS", f"30 clients, {setting}")
        tables.append(("pacs", f"pacs_30_clients{changes}", where, pacs, _ADAPTER))
    return [PublishedTable("unseen", *table, start=WEIGHTS) for table in tables]


def _fedcd() -> list[PublishedTable]:
    """Tables 1 to 3, which name no weights to start from."""
    tables = [
        ("pacs", "pacs:protocol=fedcd", _of("FedCD", "1", "PACS")),
        ("driving", "driving", _of("FedCD", "2", "driving (dataset generalization)")),
        ("bdd100k", "bdd100k", _of("FedCD", "3", "BDD100K (scene generalization)")),
    ]
    return [
        PublishedTable("unseen", *table, _columns(table[0], True), _PLAIN, start=UNSTATED)
        for table in tables
    ]


_SEVERITY_1 = "CIFAR-10-C (severity 1)"
# Of tables whose protocols are as near to a run's, the first one stands beside it.
PROTOCOLS = (
    *_fedbn_of_digits(),
    *_fedbn_of_all_digits(),
    _fedbn("1", dataset="office_caltech10", printed="Office-Caltech10"),
    _fedbn("1", dataset="domainnet", printed="DomainNet"),
    _fedbn("1", dataset="abide", printed="ABIDE"),
    *_fedig(),
    *_fedcd(),
    _tsmobn("E.5", "digits_dg", "Digits-DG"),
    _tsmobn("E.8", "digits_dg", "Digits-DG"),
    _tsmobn("E.7", "camelyon17", "Camelyon17"),
    _tsmobn("E.10", "camelyon17", "Camelyon17"),
    _tsmobn("E.4", "camelyon17", "Camelyon17", "data.truncate=False"),
    _tsmobn("1", "cifar10_c", _SEVERITY_1),
    _tsmobn("E.9", "cifar10_c", _SEVERITY_1),
    *_tsmobn_of_extras(),
    *_unifed(),
)
