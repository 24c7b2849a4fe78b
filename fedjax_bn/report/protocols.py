"""The published tables whose protocols packaged configs state."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from fedjax_bn.data.corruptions import EXTRA, INTERNAL, TYPES
from fedjax_bn.report.scores import MEAN, RUNNING

WEIGHTS = "weights of ImageNet"
UNSTATED = "unstated"


class Protocol(NamedTuple):
    """A published table, or one setting of a table.

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
      samples: domain here -> training samples of each of its clients, where the paper or its
        authors' code gives the number.
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
    samples: Mapping[str, int] = {}

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


_DIGITS = {
    **{"svhn": "SVHN", "usps": "USPS", "synth_digits": "SynthDigits", "mnist_m": "MNIST-M"},
    "mnist": "MNIST",
}
# Training images in FedBN's Table 15; Table 16 has ten times as many.
_UNCUT = {"svhn": 7943, "usps": 743, "synth_digits": 39116, "mnist_m": 5600, "mnist": 5600}
_DOMAINNET = {
    **{"clipart": "C", "infograph": "I", "painting": "P", "quickdraw": "Q", "real": "R"},
    "sketch": "S",
}
_PACS = {"photo": "P", "art_painting": "A", "cartoon": "C", "sketch": "S", MEAN: "Avg"}
_CORRUPTIONS = (
    *("gaussian", "shot", "impulse", "defocus", "glass", "motion", "zoom", "snow", "frost", "fog"),
    *("bright", "contrast", "elastic", "pixelate", "jpeg"),
)
_LETTERS = dict(zip(INTERNAL, "ABCDEFGHIJKLMNO", strict=True))
_HEADINGS = dict(zip(INTERNAL, _CORRUPTIONS, strict=True))
_SCENES = ("ClearHighway", "RainyHighway", "CityStreet", "Residential")
_OWN = "+client-specific BN"
_PLAIN = {"": "", RUNNING: ""}
_ADAPTER = _PLAIN | {"zero_shot_adapter": "-A"}
_TSMOBN = _PLAIN | {"tsmobn": "+TsmoBN"}
_INFERENCE = _PLAIN | {
    "ensemble": " + ensemble BNs",
    "iabn": " + IABN",
    "mixnorm": " + MixNorm",
    "random_alpha": " + random alpha",
    "fixed_alpha": " + fixed alpha 0.5",
}
_UNIFED = ("FedAvg", "Scaffold", "FedProx", "FedAdam", "FedNova", "MOON", "FedDC", "PerFedAvg")


def _of(paper: str, table: str, dataset: str, setting: str = "") -> dict[str, str]:
    return {"paper": paper, "table": table, "dataset": dataset} | (
        {"setting": setting} if setting else {}
    )


def _each(domains: Mapping[str, str], count: int) -> dict[str, int]:
    return dict.fromkeys(domains, count)


def _digits(
    table: str, setting: str = "", changes: str = "", samples: Mapping[str, int] | None = None
) -> Protocol:
    """A table of FedBN's digits, all five of which are clients, by default of 743 images."""
    samples = _each(_DIGITS, 743) if samples is None else samples
    where = _of("FedBN", table, "Digits-Five", setting)
    config = f"digits:{changes}" if changes else "digits"
    ends = {"target": "", "samples": samples}
    return Protocol("internal", "digits", config, where, _DIGITS, _PLAIN, **ends)


def _fedbn_of_digits() -> list[Protocol]:
    """Tables 11 and 13 to 16."""
    batches = {"10": 10, "50": 50, "full": 743}
    by_batch = [
        _digits(
            "13",
            f"B={name}, E={epochs}",
            f"batch_size={size},local_epochs={epochs},rounds={math.ceil(300 / epochs)}",
        )
        for name, size in batches.items()
        for epochs in (1, 4, 16)
    ]
    by_percent = [
        _digits(
            *("14", f"data fraction {percent}%", f"data.fraction={percent / 100}"),
            _each(_DIGITS, 7438 * percent // 100),
        )
        for percent in (100, 60, 40, 20, 5, 1)  # Table 11 has the numbers of 10 %
    ]
    unequal = [
        _digits(
            table,
            f"unequal sizes, {percent}%",
            f"data.truncate=False,data.fraction={percent / 100},local_steps={steps}",
            {name: count * percent // 10 for name, count in _UNCUT.items()},
        )
        for table, percent, steps in (("15", 10, 1223), ("16", 100, 12224))
    ]
    return [_digits("11"), *by_batch, *by_percent, *unequal]


def _fedbn_of_all_digits() -> list[Protocol]:
    """Tables 12 and 17: one client with all samples, and two unseen kinds of MNIST.

    In Table 17 FedBN has statistics of test batches, the others the running ones.
    """
    pooled = "digits:data.partition=pooled"
    columns = {"morpho_global": "Morpho-global", "morpho_local": "Morpho-local"}
    target = ",".join(columns)
    morpho = f"digits:data.name=digits_morpho,target='{target}'"
    adapted = {"FedBN": {"batch:batch_size=1000": ""}, "FedAvg": _PLAIN, "FedProx": _PLAIN}
    return [
        Protocol(
            *("unseen", "digits", pooled, _of("FedBN", "12", "Digits-Five"), _DIGITS, _PLAIN),
            samples={"pooled": 5 * 743},
        ),
        *(
            Protocol(
                *("unseen", "digits_morpho", morpho),
                _of("FedBN", "17", "Morpho-MNIST") | {"method": name},
                *(columns, ends),
                target=target,
                samples=_each(_DIGITS, 743),
            )
            for name, ends in adapted.items()
        ),
    ]


def _fedbn(dataset: str, printed: str, columns: Mapping[str, str], count: int = 0) -> Protocol:
    """A part of FedBN's Table 1, whose clients have so many images in the authors' code."""
    where = _of("FedBN", "1", printed)
    ends = {"target": "", "samples": _each(columns, count) if count else {}}
    return Protocol("internal", dataset, dataset, where, columns, _PLAIN, **ends)


def _tsmobn(
    table: str, dataset: str, printed: str, columns: Mapping[str, str], changes: str = ""
) -> Protocol:
    """A table of TsmoBN's."""
    where, config = _of("TsmoBN", table, printed), f"{dataset}:{changes}" if changes else dataset
    start = WEIGHTS if dataset == "cifar10_c" else ""
    return Protocol("unseen", dataset, config, where, columns, _TSMOBN, start=start)


def _tsmobn_of_extras() -> list[Protocol]:
    """Tables E.11 to E.13: four more corruptions, tested where one type was left out."""
    printed, columns = (
        "CIFAR-10-C (severity 1), four extra corruptions",
        {one: one for one in EXTRA},
    )
    first = {"noise": "E.11", "blur": "E.11", "weather": "E.12", "digital": "E.12"}
    config = "cifar10_c:data.corruptions="
    return [
        Protocol(
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


def _unifed() -> list[Protocol]:
    """Tables 2 and 3: with and without batch norm of the client's own, inside and outside.

    Table 3's FedBN has a global model whose batch norms are not updated (section 4.1.3).
    """
    where = _of("UniFed", "3", "CIFAR-10-C")
    served = _PLAIN | {"tsmobn": _OWN}
    never = {"": "initial:affine=False", _OWN: "tsmobn:affine=False"}
    kept = {"FedBN": f"FedAvg{_OWN}"} | {f"FedBN + {name}": f"{name}{_OWN}" for name in _UNIFED}
    inside = "cifar10_c:target=,data.validation=0.1,data.test=0.2,patience=0"
    return [
        Protocol(
            *("internal", "cifar10_c", inside, _of("UniFed", "2", "CIFAR-10-C")),
            *(_LETTERS, _PLAIN, kept, WEIGHTS, ""),
        ),
        Protocol(
            *("unseen", "cifar10_c", "cifar10_c:patience=0", where),
            *(_HEADINGS, served, {"FedBN": "its mean batch norm: no row"}, WEIGHTS),
        ),
        *(
            Protocol(
                *("unseen", "cifar10_c", "cifar10_c:patience=0", where | {"method": f"FedBN{end}"}),
                *(_HEADINGS, {adaptation: end}, {}, WEIGHTS),
            )
            for end, adaptation in never.items()
        ),
    ]


def _fedig() -> list[Protocol]:
    """Tables 1 to 3 and 5 to 11; of Table 12 no client's mean over targets is in a report."""
    many = {
        "9": ("iid labels", ""),
        "10": ("Dirichlet 0.5", ":data.partition=dirichlet,data.alpha=0.5"),
        "11": ("Dirichlet 0.1", ":data.partition=dirichlet,data.alpha=0.1"),
    }
    vlcs = {"VOC2007": "V", "LabelMe": "L", "Caltech101": "C", "SUN09": "S", MEAN: "Avg"}
    home = {"Art": "A", "Clipart": "C", "Product": "P", "Real World": "R", MEAN: "Avg"}
    tables = [
        ("pacs", "pacs", _of("FedIG-A", "5", "PACS"), _PACS, _ADAPTER),
        ("pacs", "pacs", _of("FedIG-A", "3", "PACS"), _PACS, _INFERENCE),
        ("vlcs", "vlcs", _of("FedIG-A", "7", "VLCS"), vlcs, _ADAPTER),
        ("officehome", "officehome", _of("FedIG-A", "8", "OfficeHome"), home, _ADAPTER),
    ]
    average, ranges = {MEAN: "Avg"}, ("u ~ U(0.0, 0.5)", "u ~ U(0.5, 1.0)", "u ~ U(-0.1, 1.1)")
    uniform = {"FedIG": "FedIG-A, u ~ U(0, 1)"} | {name: f"FedIG-A, {name}" for name in ranges}
    for number in ("1", "2"):
        tables.append(("pacs", "pacs", _of("FedIG-A", number, "PACS"), average, _PLAIN))
    for dataset, printed, columns in (("pacs", "PACS", _PACS), ("vlcs", "VLCS", average)):
        where = _of("FedIG-A", "6", printed)
        adapted = {"zero_shot_adapter": ""}
        tables.append((dataset, dataset, where, columns, adapted, uniform))
    for number, (setting, changes) in many.items():
        where = _of("FedIG-A", number, "PACS", f"30 clients, {setting}")
        tables.append(("pacs", f"pacs_30_clients{changes}", where, _PACS, _ADAPTER))
    return [Protocol("unseen", *table, start=WEIGHTS) for table in tables]


def _fedcd() -> list[Protocol]:
    """Tables 1 to 3, which name no weights to start from."""
    driving = {"cityscapes": "Cityscapes", "vistas": "Mapillary", "bdd100k": "BDD100K"}
    scenes = {name: name for name in _SCENES}
    tables = [
        ("pacs", "pacs:protocol=fedcd", _of("FedCD", "1", "PACS"), _PACS),
        (
            *("driving", "driving", _of("FedCD", "2", "driving (dataset generalization)")),
            driving | {MEAN: "Avg"},
        ),
        (
            *("bdd100k", "bdd100k", _of("FedCD", "3", "BDD100K (scene generalization)")),
            scenes | {MEAN: "Avg"},
        ),
    ]
    return [Protocol("unseen", *table, _PLAIN, start=UNSTATED) for table in tables]


_DIGITS_DG = {"svhn": "SVHN", "mnist_m": "MNIST-M", "mnist": "MNIST", "syn": "SYN"}
_HOSPITALS = {"center1": "hospital4", "center2": "hospital5"}
_SEVERITY_1 = "CIFAR-10-C (severity 1)"
# Of tables whose protocols are as near to a run's, the first one stands beside it.
PROTOCOLS = (
    *_fedbn_of_digits(),
    *_fedbn_of_all_digits(),
    _fedbn(
        "office_caltech10",
        "Office-Caltech10",
        {"amazon": "A", "caltech": "C", "dslr": "D", "webcam": "W"},
        62,
    ),
    _fedbn("domainnet", "DomainNet", _DOMAINNET, 105),
    _fedbn("abide", "ABIDE", {"NYU": "NYU", "USM": "USM", "UM_1": "UM", "UCLA_1": "UCLA"}),
    *_fedig(),
    *_fedcd(),
    _tsmobn("E.5", "digits_dg", "Digits-DG", _DIGITS_DG),
    _tsmobn("E.8", "digits_dg", "Digits-DG", _DIGITS_DG),
    _tsmobn("E.7", "camelyon17", "Camelyon17", _HOSPITALS),
    _tsmobn("E.10", "camelyon17", "Camelyon17", _HOSPITALS),
    _tsmobn("E.4", "camelyon17", "Camelyon17", _HOSPITALS, "data.truncate=False"),
    _tsmobn("1", "cifar10_c", _SEVERITY_1, _HEADINGS),
    _tsmobn("E.9", "cifar10_c", _SEVERITY_1, _HEADINGS),
    *_tsmobn_of_extras(),
    *_unifed(),
)
