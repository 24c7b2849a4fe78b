"""FedBN's Tables 1 and 11 to 17, Fig. 3 to 9 and Appendix G (Li et al., ICLR 2021).

    python launch/sweeps/fedbn.py [--only "Table 11"] [--data FOLDER] [--dry-run]     see sweep.py

NAMEs of data: digits, office, domainnet, abide, as their config files take data.path; and morpho,
the digits' file with Morpho-MNIST, see launch/convert/digits.py.

Percentages are shares of the given training samples, cut to the smallest domain: 10 % of the
original data sets are the paper's 743. For an `.npz` that holds these 743 already, add
--config.data.fraction=1 --config.data.truncate=False, but only to the tables at 10 %. The report
marks runs whose numbers of training samples are not the paper's.

Decisions where the paper is silent: T = 300 epochs for every E, so T/E rounds (section 4.2),
rounded up. There is one seed if the paper prints no standard deviation, else five. B = inf is one
batch of 743. With unequal sizes (E.6) all clients make the steps of the largest client's epoch.
FedProx's mu is "the best value founded by grid search" of FedProx's defaults, which the text does
not name: here it is 0.01 on digits and ABIDE, and 0.001, as in the authors' code, on
Office-Caltech10 and DomainNet. The tables "mu" have the whole grid and, with a validation set, the
mu that validation chooses. Fig. 3 and 7 show the loss after aggregation in evaluation mode, as in
the authors' code, in every round. Table 17 tests FedBN with the statistics of test batches, as the
paper does; it tests FedAvg and FedProx with running statistics, and with those of test batches too.
"""

import math
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import figures
import plan
from domains import DOMAINS
from plan import Column, Protocol, Row, Table, Training, columns_of, table, training
from sweep import main

from fedjax_bn.report.published import published

# Settings of Tables 13 to 16.
BATCHES = {"10": 10, "50": 50, "full": 743}
PERCENTS = (100, 60, 40, 20, 10, 5, 1)
# Training images in Table 15; Table 16 has ten times as many.
UNCUT = {"svhn": 7943, "usps": 743, "synth_digits": 39116, "mnist_m": 5600, "mnist": 5600}
# Training images of each client in the authors' code.
OF_EACH = {"office_caltech10": 62, "domainnet": 105}
# "fonts" replace SynthDigits in copies of the digits without SynthDigits
DIGITS = DOMAINS["digits"] | {"fonts": "fonts"}
SYNTHETIC = {"identity covariance": "identity", "correlated": "correlated"}

TRAININGS = {
    label: training(label.lower()) for label in ("SingleSet", "FedAvg", "FedProx", "FedBN")
}
TWO = ("FedAvg", "FedBN")
# The authors' code has this mu; its term is the norm and not its square.
WITH_THEIR_MU = {"FedProx": training("fedprox:mu=0.001")}
FEDERATED = ("FedAvg", "FedProx", "FedBN")
OWN_STATISTICS = "batch:batch_size=1000"  # batches of about a tenth of the unseen client's samples
LOCAL_EPOCHS = (1, 4, 8, 16)
CLIENTS = tuple(range(1, 11))
MUS = (0.001, 0.01, 0.1, 1.0)  # FedProx's own grid


def rows(*methods: str) -> dict[str, Training]:
    """Returns a row for each method."""
    return {label: TRAININGS[label] for label in methods}


NEEDS_DIGITS = {"data.path": "digits"}
TENTH = {"data.fraction": 0.1, "data.truncate": True}  # set, as the defaults depend on the data


def each(count: int) -> dict[str, int]:
    """Returns the same number of training samples for every digit domain."""
    return dict.fromkeys(DIGITS.values(), count)


OF_EACH_DIGIT = each(743)


def digits(
    setting: str,
    changes: Mapping[str, object],
    seeds: int = 1,
    samples: Mapping[str, int] = OF_EACH_DIGIT,
) -> Protocol:
    """Returns the protocol of configs/digits.py with a tenth of the data and with changes."""
    ends = (columns_of(DIGITS), seeds, NEEDS_DIGITS, TENTH | dict(changes), samples)
    return Protocol(f"digits/{setting}", "configs/digits.py", *ends)


def epochs(count: int) -> dict[str, int]:
    """Returns the keys of E local epochs: 300 epochs in all, the rounds rounded up."""
    return {"local_epochs": count, "rounds": math.ceil(300 / count)}


def unequal(percent: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Returns the keys and training samples of Tables 15 (10 %) and 16 (100 %).

    All clients make the steps of the largest one, SynthDigits, in an epoch (E.6).
    """
    samples = {name: count * percent // 10 for name, count in UNCUT.items()}
    steps = math.ceil(samples["synth_digits"] / 32)
    changes = {"data.truncate": False, "data.fraction": percent / 100, "local_steps": steps}
    return changes, samples


CURVES = {"eval_also": ("unseen", "train_loss"), "eval_every": 1}
DEFAULT = digits("E1", CURVES, 5)
BY_EPOCHS = {e: digits(f"E{e}", CURVES | epochs(e)) for e in LOCAL_EPOCHS} | {1: DEFAULT}
BY_PERCENT = {
    p: digits(f"data{p}", {"data.fraction": p / 100}, samples=each(7438 * p // 100))
    for p in PERCENTS
} | {10: DEFAULT}
BY_CLIENTS = {  # 743 training images a client
    n: digits(f"clients{n}", {"data.clients_per_domain": n, "data.fraction": n / 10})
    for n in CLIENTS
} | {1: DEFAULT}
BY_BATCH = {
    (b, e): digits(f"B{b}-E{e}", {"batch_size": size, **epochs(e)})
    for b, size in BATCHES.items()
    for e in (1, 4, 16)
}
UNEQUAL = {p: digits(f"unequal{p}", keys, 1, samples)
           for p in (10, 100) for keys, samples in [unequal(p)]}  # fmt: skip
CENTRALIZED = digits("centralized", {"data.partition": "pooled"}, 5, {"pooled": 5 * 743})
REAL = {
    printed: Protocol(
        *(name, f"configs/{config}.py", columns_of(DOMAINS[config]), 5, {"data.path": name}, {}),
        dict.fromkeys(DOMAINS[config].values(), OF_EACH[config]) if config in OF_EACH else {},
    )
    for printed, name, config in (
        ("Office-Caltech10", "office", "office_caltech10"),
        ("DomainNet", "domainnet", "domainnet"),
        ("ABIDE", "abide", "abide"),
    )
}
UNSEEN_DIGITS = Protocol(
    *("morpho", "configs/digits.py", columns_of(DOMAINS["digits_morpho"]), 1),
    {"data.path": "morpho"},
    {
        **TENTH,
        "data.name": "digits_morpho",
        "target": ",".join(DOMAINS["digits_morpho"].values()),
        "adaptations": ("running", OWN_STATISTICS),
    },
    OF_EACH_DIGIT,
)
JOINED = plan.Evaluation("joined", {}, program=("launch/joining.py",))
JOINING = Protocol(
    *("join", "configs/digits.py", plan.left_out(DOMAINS["digits"]), 1, NEEDS_DIGITS, TENTH),
    OF_EACH_DIGIT,
)
GAUSSIANS = Protocol("synthetic", "configs/synthetic.py", columns_of(SYNTHETIC), 5, {}, {})


where = partial(plan.where, "FedBN")


def combinations() -> Table:
    """Returns Table 13, which has a protocol for each setting."""
    parts = []
    for (b, e), protocol in BY_BATCH.items():
        setting = f"B={b}, E={e}"
        part = table("", "", protocol, rows(*TWO), where(13, setting=setting))
        parts.append((f"{setting}, ", part))
    return plan.stacked("table13", "Table 13: local epochs E and batch size B", parts)


def over(
    name: str, title: str, protocols: dict[str, Protocol], methods: tuple[str, ...], number: str
) -> Table:
    """Returns a table with a row for each domain and method, and a column for each setting.

    Args:
      protocols: heading -> protocol.
      methods: the rows of each domain.
      number: the published table, whose settings are "data fraction HEADING"; "" for no table.
    """
    found, made = {}, []
    for domain, client in DIGITS.items():
        for label in methods:
            row, cells = Row((TRAININGS[label],)), []
            for heading, protocol in protocols.items():
                printed = ()
                if number and domain != "fonts":
                    setting = f"data fraction {heading}"
                    printed = published(
                        **where(number, setting=setting, method=label, column=domain)
                    )
                cells.append(protocol.cell(row, Column(("",), client), printed))
                made += protocol.runs(row.trainings)
            found[f"{domain}, {label}"] = tuple(cells)
    return Table(name, title, tuple(protocols), found, tuple(made))


def centralized() -> Table:
    """Returns Table 12: centralized training beside FedBN."""
    pooled = table("", "", CENTRALIZED, {"Centralized": TRAININGS["FedAvg"]}, where(12))
    parts = [("", pooled), ("", table("", "", DEFAULT, rows("FedBN"), where(12)))]
    return plan.stacked("table12", "Table 12: centralized training", parts)


def unseen_rows() -> dict[str, Row | Training]:
    """Returns Table 17's rows as printed, and further rows of methods and statistics."""
    found: dict[str, Row | Training] = {"FedBN": Row((TRAININGS["FedBN"],), OWN_STATISTICS)}
    for label in ("FedProx", "FedAvg"):
        found[label] = TRAININGS[label]
        found[f"{label}, statistics of test batches"] = Row((TRAININGS[label],), OWN_STATISTICS)
    return found


# Appendix G prints no numbers: here each of the digit domains joins the other four.
THEN_JOINED = training("fedbn", tests=(JOINED,))
JOINING_ROWS = {
    "FedBN, as received": Row((THEN_JOINED,), "received", test=JOINED.name),
    "FedBN, own batch norm learned": Row((THEN_JOINED,), "joined", test=JOINED.name),
}


def methods_on(protocol: Protocol) -> dict[str, Training]:
    """Returns the row of each method on a data set of Table 1."""
    return TRAININGS | (WITH_THEIR_MU if protocol.name in ("office", "domainnet") else {})


def grid(dataset: str, protocol: Protocol, usual: float, validated: bool) -> Table:
    """Returns a table of FedProx by mu; for the usual mu it takes the run of the other tables."""
    by_mu = {mu: training(f"fedprox:mu={mu}", f"fedprox-mu{mu}") for mu in MUS}
    by_mu[usual] = methods_on(protocol)["FedProx"]
    found: dict[str, Row | Training] = {f"mu = {mu}": one for mu, one in by_mu.items()}
    if validated:
        found["by validation"] = Row(tuple(by_mu.values()))
    title = f"mu: FedProx on {dataset}"
    return table(f"mu-{dataset}", title, protocol, found, None, average="mean")


DATA_TABLE = over(
    "table14",
    "Table 14: amount of data",
    {f"{p}%": protocol for p, protocol in BY_PERCENT.items()},
    ("SingleSet", *TWO),
    "14",
)
METHODS_TABLE = table("table11", "Table 11: methods, 10 % of data", DEFAULT, TRAININGS, where(11))
TABLES = (
    *(
        table(f"table1-{p.name}", f"Table 1: {d}", p, methods_on(p), where(1, dataset=d))
        for d, p in REAL.items()
    ),
    METHODS_TABLE,
    centralized(),
    combinations(),
    DATA_TABLE,
    table("table15", "Table 15: unequal sizes, 10 %", UNEQUAL[10], rows(*FEDERATED), where(15)),
    table("table16", "Table 16: unequal sizes, 100 %", UNEQUAL[100], rows(*FEDERATED), where(16)),
    table("table17", "Table 17: unseen clients", UNSEEN_DIGITS, unseen_rows(), where(17)),
    table("joining", "Appendix G: a client that joins later", JOINING, JOINING_ROWS),
    grid("digits", DEFAULT, 0.01, False),
    *(grid(p.name, p, 0.01 if d == "ABIDE" else 0.001, d != "ABIDE") for d, p in REAL.items()),
)


def loss_figure(
    name: str, title: str, protocol: Protocol, domains: dict[str, str], key: str = "train_loss"
) -> plan.Figure:
    """Returns the figure of both methods' training losses by client.

    The key "train_loss" is the loss after aggregation, "loss" the loss of the local steps.
    """
    methods = {label: protocol.names("", TRAININGS[label]) for label in TWO}
    panels = {
        heading: {label: (own, (key, client)) for label, own in methods.items()}
        for heading, client in domains.items()
    }
    draw = partial(figures.curves, panels=panels, ylabel="training loss")
    return plan.Figure(name, title, protocol.runs(TRAININGS[label] for label in TWO), draw)


ALL_E = over("fig4a", "Fig. 4a: local epochs", {str(e): p for e, p in BY_EPOCHS.items()}, TWO, "")
FRACTIONS = {f"{p}%": protocol for p, protocol in BY_PERCENT.items()}
ALL_FRACTIONS = over("fig4b", "Fig. 4b: amount of data", FRACTIONS, ("SingleSet", "FedBN"), "")
NUMBERS = {str(n): protocol for n, protocol in BY_CLIENTS.items()}
ALL_CLIENTS = over("fig4c", "Fig. 4c: heterogeneity", NUMBERS, TWO, "")
ALL_BATCHES = [
    over(f"fig8-B{b}", f"Fig. 8: B = {b}", {str(e): BY_BATCH[b, e] for e in (1, 4, 16)}, TWO, "")
    for b in BATCHES
]
PLAIN = TRAININGS["FedBN"]
FIGURES = (
    loss_figure("fig3", "Fig. 3: training loss, E = 1", DEFAULT, DIGITS),
    figures.line_figure(ALL_E, "local epochs E"),
    figures.line_figure(ALL_FRACTIONS, "percentage of the data", log=True),
    figures.line_figure(ALL_CLIENTS, "clients a domain"),
    figures.bar_figure("fig5", "Fig. 5: methods", METHODS_TABLE),
    plan.Figure(
        *("fig6", "Fig. 6: what the clients see, and their pixels", DEFAULT.runs([PLAIN])),
        partial(figures.pixels, runs=DEFAULT.names("", PLAIN)),
    ),
    *(
        loss_figure(f"fig7-E{e}", f"Fig. 7: training loss, E = {e}", protocol, DIGITS)
        for e, protocol in BY_EPOCHS.items()
    ),
    *(figures.line_figure(one, "local epochs E") for one in ALL_BATCHES),
    loss_figure(
        "fig9", "Fig. 9: training loss on synthetic Gaussians", GAUSSIANS, SYNTHETIC, "loss"
    ),
)
SWEEP = plan.Sweep("fedbn", "FedBN (Li et al., ICLR 2021)", TABLES, FIGURES)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
