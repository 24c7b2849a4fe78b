"""Every run behind FedBN's Fig. 3 to 5 and 9, and Tables 1 and 11 to 17 (Li et al., ICLR 2021).

    python launch/sweeps/fedbn.py list|run|report --workdir DIR [--only GLOB] [--data.NAME=PATH ...]

NAME is digits, office, domainnet or abide: what its config file takes as data.path; or morpho, the
digits' folder with Morpho-MNIST in it, see fedjax_bn/data/sets/digits_morpho.py.

Decisions where the paper is silent: T = 300 epochs whatever E, so T/E rounds (section 4.2), rounded
up. One seed where the paper prints no standard deviation, five where it does. B = inf is one batch
of 743. Unequal sizes (E.6): all clients make the steps of the largest client's epoch.
"""

import math
import sys
from functools import partial

import figures
from plan import Cell, Figure, Run, Sweep, Table, seeds
from sweep import main

from fedjax_bn.run.report.published import published

METHODS = {"SingleSet": "singleset", "FedAvg": "fedavg", "FedProx": "fedprox", "FedBN": "fedbn"}
FEDERATED = ("FedAvg", "FedProx", "FedBN")
TWO = ("FedAvg", "FedBN")
SEEDS = 5

# heading in the paper -> domain here; "fonts" stands in for SynthDigits where those are not at hand
DIGITS = {
    "SVHN": "svhn",
    "USPS": "usps",
    "SynthDigits": "synth_digits",
    "MNIST-M": "mnist_m",
    "MNIST": "mnist",
    "fonts": "fonts",
}
MORPHO = {"Morpho-global": "morpho_global", "Morpho-local": "morpho_local"}
OFFICE = {"A": "amazon", "C": "caltech", "D": "dslr", "W": "webcam"}
DOMAINNET = {
    "C": "clipart",
    "I": "infograph",
    "P": "painting",
    "Q": "quickdraw",
    "R": "real",
    "S": "sketch",
}
ABIDE = {"NYU": "NYU", "USM": "USM", "UM": "UM_1", "UCLA": "UCLA_1"}
SYNTHETIC = {"identity covariance": "identity", "correlated": "correlated"}

EPOCHS = 300
OWN_STATISTICS = "batch:batch_size=1000"  # of a tenth of the unseen client's samples
LOCAL_EPOCHS = (1, 4, 8, 16)
BATCHES = {"10": 10, "50": 50, "full": 743}
PERCENTS = (100, 60, 40, 20, 10, 5, 1)
CLIENTS = tuple(range(1, 11))
STEPS = {10: 1223, 100: 12224}  # of 32 samples in an epoch of SynthDigits, the largest


def epochs(count: int) -> dict[str, int]:
    """The keys of E local epochs."""
    return {"local_epochs": count, "rounds": math.ceil(EPOCHS / count)}


def setting_of_percent(percent: int) -> str:
    """The default setting has 10 %."""
    return "E1" if percent == 10 else f"data{percent}"


def setting_of_clients(count: int) -> str:
    """The default setting has one client a domain."""
    return "E1" if count == 1 else f"clients{count}"


# setting -> methods, seeds, changes of configs/digits.py
SETTINGS = {
    "E1": (tuple(METHODS), SEEDS, {}),
    **{f"E{e}": (TWO, 1, epochs(e)) for e in LOCAL_EPOCHS[1:]},
    **{
        f"B{name}-E{e}": (TWO, 1, {"batch_size": size, **epochs(e)})
        for name, size in BATCHES.items()
        for e in (1, 4, 16)
    },
    **{
        setting_of_percent(p): (("SingleSet", *TWO), 1, {"data.fraction": p / 100})
        for p in PERCENTS
        if p != 10
    },
    **{  # 743 training images a client
        setting_of_clients(n): (TWO, 1, {"data.clients_per_domain": n, "data.fraction": n / 10})
        for n in CLIENTS[1:]
    },
    **{
        f"unequal{p}": (
            FEDERATED,
            1,
            {"data.truncate": False, "data.fraction": p / 100, "local_steps": steps},
        )
        for p, steps in STEPS.items()
    },
    "centralized": (("FedAvg",), SEEDS, {"data.partition": "pooled"}),
}


def digits_runs() -> list[Run]:
    """All runs on digits."""
    runs = []
    for setting, (methods, count, changes) in SETTINGS.items():
        for method in methods:
            name = f"digits/{setting}/{METHODS[method]}"
            changed = {"method": METHODS[method], **changes}
            runs += seeds(count, name, "configs/digits.py", changed, "digits")
    return runs


def other_runs() -> list[Run]:
    """All runs on other data."""
    runs = []
    for method in METHODS:
        for data, config in (
            ("office", "office_caltech10"),
            ("domainnet", "domainnet"),
            ("abide", "abide"),
        ):
            changes = {"method": METHODS[method]}
            name = f"{data}/{METHODS[method]}"
            runs += seeds(SEEDS, name, f"configs/{config}.py", changes, data)
    for method in FEDERATED:
        changes = {"method": METHODS[method], "data.name": "digits_morpho"}
        changes |= {"target": ",".join(MORPHO.values()), "adaptations": (OWN_STATISTICS,)}
        runs += seeds(1, f"morpho/{METHODS[method]}", "configs/digits.py", changes, "morpho")
    for method in TWO:
        changes = {"method": METHODS[method]}
        runs += seeds(SEEDS, f"synthetic/{METHODS[method]}", "configs/synthetic.py", changes, "")
    return runs


RUNS = (*digits_runs(), *other_runs())


def names(prefix: str) -> tuple[str, ...]:
    """All runs below a folder, such as "digits/E1/fedbn"."""
    return tuple(run.name for run in RUNS if run.name.startswith(f"{prefix}/"))


def row(
    prefix: str, columns: dict[str, str], adaptation: str = "running", **where: str
) -> tuple[Cell, ...]:
    """The cells of one method, a column a domain, beside the published ones that `where` names."""
    printed = {cell.column: (cell.mean, cell.std) for cell in published(paper="FedBN", **where)}
    return tuple(
        Cell(names(prefix), domain, printed.get(column), adaptation)
        for column, domain in columns.items()
    )


def tables() -> list[Table]:
    """Tables 1 and 11 to 17."""
    every = tuple(DIGITS)
    table1 = {
        dataset: Table(
            f"table1-{data}",
            f"Table 1: {dataset}",
            tuple(domains),
            {
                m: row(f"{data}/{METHODS[m]}", domains, table="1", dataset=dataset, method=m)
                for m in METHODS
            },
        )
        for dataset, data, domains in (
            ("Office-Caltech10", "office", OFFICE),
            ("DomainNet", "domainnet", DOMAINNET),
            ("ABIDE", "abide", ABIDE),
        )
    }
    return [
        *table1.values(),
        Table("table11", "Table 11 (Fig. 5): methods, 10 % of data", every, methods(11, "E1")),
        Table("table12", "Table 12: centralized training", every, centralized()),
        Table("table13", "Table 13: local epochs E and batch size B", every, combinations()),
        Table("table14", "Table 14 (Fig. 4b): amount of data", percents(), fractions()),
        Table("table15", "Table 15: unequal sizes, 10 %", every, methods(15, "unequal10")),
        Table("table16", "Table 16: unequal sizes, 100 %", every, methods(16, "unequal100")),
        Table(
            "table17",
            "Table 17: unseen clients, mean affine and their own statistics",
            tuple(MORPHO),
            {
                m: row(f"morpho/{METHODS[m]}", MORPHO, OWN_STATISTICS, table="17", method=m)
                for m in reversed(FEDERATED)
            },
        ),
    ]


def methods(table: int, setting: str) -> dict[str, tuple[Cell, ...]]:
    """One row for each method of a setting."""
    return {
        m: row(f"digits/{setting}/{METHODS[m]}", DIGITS, table=str(table), method=m)
        for m in SETTINGS[setting][0]
    }


def centralized() -> dict[str, tuple[Cell, ...]]:
    """Table 12."""
    return {
        "Centralized": row("digits/centralized/fedavg", DIGITS, table="12", method="Centralized"),
        "FedBN": row("digits/E1/fedbn", DIGITS, table="12", method="FedBN"),
    }


def combinations() -> dict[str, tuple[Cell, ...]]:
    """Table 13."""
    return {
        f"B={b}, E={e}, {m}": row(
            f"digits/B{b}-E{e}/{METHODS[m]}",
            DIGITS,
            table="13",
            setting=f"B={b}, E={e}",
            method=m,
        )
        for b in BATCHES
        for e in (1, 4, 16)
        for m in TWO
    }


def percents() -> tuple[str, ...]:
    """The columns of Table 14."""
    return tuple(f"{percent}%" for percent in PERCENTS)


def fractions() -> dict[str, tuple[Cell, ...]]:
    """Table 14: a row for each domain and method."""
    rows = {}
    for domain, client in DIGITS.items():
        for m in ("SingleSet", *TWO):
            cells = []
            for percent in PERCENTS:
                where = {"table": "14", "setting": f"data fraction {percent}%", "method": m}
                prefix = f"digits/{setting_of_percent(percent)}/{METHODS[m]}"
                cells += row(prefix, {domain: client}, **where)
            rows[f"{domain}, {m}"] = tuple(cells)
    return rows


def all_figures() -> list[Figure]:
    """Figures 3 to 5, and 9 of Appendix F."""
    both = {m: names(f"digits/E1/{METHODS[m]}") for m in TWO}
    synthetic = {m: names(f"synthetic/{METHODS[m]}") for m in TWO}
    return [
        curves("fig3", "Fig. 3: training loss, E = 1", both, DIGITS),
        lines(
            "fig4a", "Fig. 4a: local epochs", "local epochs E", {e: f"E{e}" for e in LOCAL_EPOCHS}
        ),
        lines(
            "fig4b",
            "Fig. 4b: amount of data",
            "percentage of the data",
            {p: setting_of_percent(p) for p in PERCENTS},
            log=True,
            methods=("SingleSet", "FedBN"),
        ),
        lines(
            "fig4c",
            "Fig. 4c: heterogeneity",
            "clients a domain",
            {n: setting_of_clients(n) for n in CLIENTS},
        ),
        bars("fig5", "Fig. 5: methods", "table11"),
        curves("fig9", "Fig. 9: training loss on synthetic Gaussians", synthetic, SYNTHETIC),
    ]


def curves(
    name: str, title: str, runs: dict[str, tuple[str, ...]], domains: dict[str, str]
) -> Figure:
    """A figure of training losses."""
    draw = partial(figures.loss_curves, methods=runs, domains=domains)
    return Figure(name, title, tuple(n for of_method in runs.values() for n in of_method), draw)


def lines(
    name: str,
    title: str,
    xlabel: str,
    settings: dict[int, str],
    log: bool = False,
    methods: tuple[str, ...] = TWO,
) -> Figure:
    """A figure of accuracy over a setting."""
    runs = {
        m: {x: names(f"digits/{setting}/{METHODS[m]}") for x, setting in settings.items()}
        for m in methods
    }
    draw = partial(figures.accuracy_lines, methods=runs, domains=DIGITS, xlabel=xlabel, log=log)
    every = tuple(n for points in runs.values() for point in points.values() for n in point)
    return Figure(name, title, every, draw)


def bars(name: str, title: str, table: str) -> Figure:
    """A figure of a table's numbers."""
    (shown,) = (t for t in tables() if t.name == table)
    runs = tuple(dict.fromkeys(n for cells in shown.rows.values() for c in cells for n in c.runs))
    return Figure(name, title, runs, partial(figures.accuracy_bars, table=shown))


SWEEP = Sweep("FedBN (Li et al., ICLR 2021)", RUNS, tables, all_figures)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
