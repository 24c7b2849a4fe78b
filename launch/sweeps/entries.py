"""Lists what `all_methods.py` compares: a row for each method or way to weigh, perturb or serve.

Arguments are the methods' defaults, whose sources the methods' docstrings name; a row sets only the
keys that its method requires. Nothing is tuned here.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple

BASELINE = "FedAvg"
RUNNING, TSMOBN = "running", "tsmobn"


class Entry(NamedTuple):
    """A row of the comparison."""

    # the changes of the config, with the method; rows of equal changes share their runs
    changes: Mapping[str, Any]
    adaptation: str = RUNNING  # the adaptation for unseen clients
    norm: str = ""  # the layer that replaces the model's batch norms; "" keeps them

    @property
    def folder(self) -> str:
        """The folder of the row's runs."""
        said = [self.changes["method"], *(f"{k}-{v}" for k, v in self.changes.items())]
        parts = [part for part in said if not part.startswith("method-")]
        norm = [f"norm-{self.norm}"] if self.norm else []
        return "-".join([*parts, *norm]).replace(":", "-").replace("=", "-")

    @property
    def adaptations(self) -> tuple[str, ...]:
        """All adaptations with which the runs are tested, those of rows that share them too."""
        own = {"fediga": (RUNNING, "zero_shot_adapter"), "copa": ("learned_alpha",)}
        served = own.get(self.changes["method"], (RUNNING,))
        return served if self.norm or self.changes["method"] == "copa" else (*served, TSMOBN)


def _plain(method: str, **changes: Any) -> Entry:
    """Returns the row of a method; data__augment is the changed key data.augment."""
    return Entry({"method": method} | {k.replace("__", "."): v for k, v in changes.items()})


FEDAVG = _plain("fedavg")
ENTRIES: dict[str, Entry] = {
    BASELINE: FEDAVG,
    "FedAvg, TsmoBN": FEDAVG._replace(adaptation=TSMOBN),
    "FedAvg, group norm": FEDAVG._replace(norm="group"),
    "SingleSet": _plain("singleset"),
    "FedProx": _plain("fedprox"),
    "SCAFFOLD": _plain("scaffold"),
    "FedNova": _plain("fednova"),
    "FedAvgM": _plain("fedavgm"),
    "FedAdam": _plain("fedadam"),
    "FedYogi": _plain("fedyogi"),
    "FedAdagrad": _plain("fedadagrad"),
    "MOON": _plain("moon"),
    "FedDC": _plain("feddc"),
    "Per-FedAvg": _plain("perfedavg"),
    "FedBN": _plain("fedbn"),
    "FedBN, TsmoBN": _plain("fedbn")._replace(adaptation=TSMOBN),
    "SiloBN": _plain("silobn"),
    "FixBN": _plain("fixbn"),
    "HBN": _plain("hbn"),
    "PN": _plain("pn"),
    "FedWon": _plain("fedwon")._replace(norm="none"),
    "FedIG": _plain("fediga"),
    "FedIG-A": _plain("fediga")._replace(adaptation="zero_shot_adapter"),
    "FedCD": _plain("fedcd"),
    "FedCD-SCI": _plain("fedcd", weigh="by_size"),
    "REA": _plain("fedavg", weigh="risk_extrapolation"),
    "FedDG-GA": _plain("fedavg", weigh="generalization_adjustment"),
    "FedSAM": _plain("fedsam"),
    "FedASAM": _plain("fedsam:rho=0.7:eta=0.2"),
    "FedGAMMA": _plain("fedsam:variates=True"),
    "FedSR": _plain("fedsr"),
    "AM": _plain("fedavg", **{"data.perturb": "amplitude_mix"}),
    "RandConv": _plain("randconv"),
    "RSC": _plain("rsc"),
    "MixStyle": _plain("mixstyle"),
    "FedFA": _plain("fedfa"),
    "FedRDN": _plain("fedrdn"),
    "RandAug": _plain("fedavg", data__augment="randaug"),
    "JiGen": _plain("jigen"),
    "CSD": _plain("csd"),
    "COPA": _plain("copa")._replace(adaptation="learned_alpha"),
    "FedDG": _plain("feddg:spectra=16"),
    "HarmoFL": _plain("harmofl"),
    "SelfReg": _plain("selfreg"),
    "SFA": _plain("sfa"),
    "SNR": _plain("snr"),
    "L2D": _plain("l2d"),
    "CSAC": _plain("csac"),
    "FedADG": _plain("fedadg"),
    "FedPer": _plain("fedavg", share="all_but_head"),
    "FedRep": _plain("fedrep"),
    "LG-FedAvg": _plain("fedavg", share="only_head"),
    "FedAvg, group norms stay": _plain("fedavg", share="all_but_norms")._replace(norm="group"),
    "Ditto": _plain("ditto"),
    "APFL": _plain("apfl"),
    "FedALA": _plain("fedala"),
    "gPerXAN": _plain("gperxan"),
    "FedDyn": _plain("feddyn"),
    "FedAWA": _plain("fedawa"),
    "FedLWS": _plain("fedlws"),
    "FedRoD": _plain("fedrod"),
    "FedBABU": _plain("fedbabu"),
}


def chosen_rows(only: str) -> dict[str, Entry]:
    """Returns the rows whose names match any of the globs, which commas separate."""
    patterns = [pattern.strip().lower() for pattern in only.split(",")] if only else ["*"]
    rows = {
        label: entry
        for label, entry in ENTRIES.items()
        if any(fnmatch(label.lower(), pattern) for pattern in patterns)
    }
    if not rows:
        raise SystemExit(f"--only={only} fits no row: rows are {', '.join(ENTRIES)}")
    return rows
