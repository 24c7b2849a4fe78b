"""Every run behind UniFed's Fig. 3, 5 and 6 and Tables 2 and 3 (Jiang et al.).

    python launch/sweeps/unifed.py list|run|report --workdir DIR [--only GLOB] [--data.NAME=PATH]

NAME is cifar10_c (the published folder, or CIFAR-10, from which the corruptions are made) or
camelyon17, as their config files take data.path.

Eight algorithms, each with batch norm averaged and kept by the clients ("own"), three seeds
(section 4: "three independent runs"), in two protocols: all 15 corruptions as internal clients,
divided 0.7, 0.1 and 0.2; and one of four types of corruption left out, external clients. External
clients are tested with the received running statistics and with test-specific ones (TsmoBN,
momentum 0.9); what Table 3 calls "+Ours" is the latter after training with averaged batch norm, and
its row FedBN is FedAvg with batch norm kept. PerFedAvg adapts to 16 labelled samples of a client
first. A run on Camelyon17 serves both: three hospitals train and test, two are external. Fig. 6 has
runs of its own, tested once, at their end.

Decisions where the paper is silent: severity 1, as TsmoBN, whose numbers Table 3 repeats; the
algorithms' own arguments are those of their papers (fedjax_bn/run/defaults.py); the columns A to O
of Table 2 are the corruptions in the order of Table 3.
"""

import sys
from functools import partial

import figures
from plan import Cell, Figure, Run, Sweep, Table, seeds
from sweep import main

from fedjax_bn.data.corruptions import INTERNAL, TYPES
from fedjax_bn.run.report.published import published

METHODS = {
    "FedAvg": "fedavg",
    "Scaffold": "scaffold",
    "FedProx": "fedprox",
    "FedAdam": "fedadam",
    "FedNova": "fednova",
    "MOON": "moon",
    "FedDC": "feddc",
    "PerFedAvg": "perfedavg",
}
SHARES = {"averaged": "everything", "own": "all_but_batch_norm"}
SEEDS = 3
OURS = "+client-specific BN"  # behind a method's name in the published tables
TRACKED = "tsmobn"
ABLATED = "camelyon17/ablation/averaged"
# headings of Table 3 -> domain; Table 2 has the letters A to O
EXTERNAL = dict(
    zip(
        (
            *("gaussian", "shot", "impulse", "defocus", "glass", "motion", "zoom", "snow", "frost"),
            *("fog", "bright", "contrast", "elastic", "pixelate", "jpeg"),
        ),
        INTERNAL,
        strict=True,
    )
)
LETTERS = dict(zip("ABCDEFGHIJKLMNO", INTERNAL, strict=True))
TYPE_OF = {corruption: kind for kind, own in TYPES.items() for corruption in own}

HOSPITALS = {"hospital1": "center0", "hospital2": "center3", "hospital3": "center4"}
OUTSIDE = {"hospital4": "center1", "hospital5": "center2"}
BATCHES = tuple(2**k for k in range(1, 10))
MOMENTA = tuple(k / 10 for k in range(10))
ORDERS = tuple(range(10))
ABLATIONS = (
    "running",
    *(f"batch:batch_size={size}" for size in BATCHES),
    *(f"tsmobn:momentum={momentum}" for momentum in MOMENTA),
    *(f"tsmobn:order={order}" for order in ORDERS),
)

PROTOCOL = {"target": "", "data.validation": 0.1, "data.test": 0.2}  # of internal clients


def cifar_runs(config: str, count: int, external: int, data: str) -> list[Run]:
    """All runs on CIFAR-10-C.

    Args:
      config: its file.
      count: seeds of the internal protocol.
      external: seeds of the external one.
      data: the name of the data's path.
    """
    runs = []
    for method in METHODS.values():
        for folder, share in SHARES.items():
            changes = {"method": method, "share": share}
            inside = f"internal/{method}/{folder}"
            runs += seeds(count, inside, config, changes | PROTOCOL, data)
            for kind in TYPES:
                left = f"external/{kind}/{method}/{folder}"
                runs += seeds(external, left, config, changes | {"target": kind}, data)
    return runs


def camelyon_runs() -> list[Run]:
    """All runs on Camelyon17."""
    runs = []
    divided = {"data.validation": 0.1, "data.test": 0.2}
    for method in METHODS.values():
        for folder, share in SHARES.items():
            changes = {"method": method, "share": share, **divided}
            name = f"camelyon17/{method}/{folder}"
            runs += seeds(SEEDS, name, "configs/camelyon17.py", changes, "camelyon17")
    once = {"method": "fedavg", "adaptations": ABLATIONS, "rounds": 200, "eval_every": 200}
    return runs + seeds(SEEDS, ABLATED, "configs/camelyon17.py", once | divided, "camelyon17")


RUNS = (*cifar_runs("configs/cifar10_c.py", SEEDS, SEEDS, "cifar10_c"), *camelyon_runs())


def names(runs: tuple[Run, ...], prefix: str) -> tuple[str, ...]:
    """All runs below a folder, such as "internal/fedavg/own"."""
    return tuple(run.name for run in runs if run.name.startswith(f"{prefix}/"))


def printed(table: str, method: str) -> dict[str, tuple[float, float | None]]:
    """Column -> published mean and std; {} for a row that the paper has not."""
    every = published(paper="UniFed", table=table)
    return {cell.column: (cell.mean, cell.std) for cell in every if cell.method == method}


def table2(runs: tuple[Run, ...]) -> Table:
    """Internal clients, each with its own model; the mean over them behind the paper's columns."""
    rows = {}
    for label, method in METHODS.items():
        for folder, ours in (("averaged", ""), ("own", OURS)):
            own = names(runs, f"internal/{method}/{folder}")
            numbers = with_mean(printed("2", label + ours), LETTERS)
            domains = {**LETTERS, "mean": "mean"}
            rows[label + ours] = tuple(Cell(own, d, numbers.get(c)) for c, d in domains.items())
    title = "Table 2: internal clients A to O (gaussian_noise to jpeg_compression)"
    return Table("table2", title, (*LETTERS, "mean"), rows)


def with_mean(
    numbers: dict[str, tuple[float, float | None]], columns: dict[str, str]
) -> dict[str, tuple[float, float | None]]:
    """Published numbers of all columns, and their mean, which the paper does not print."""
    if not numbers:
        return {}
    return numbers | {"mean": (sum(numbers[c][0] for c in columns) / len(columns), None)}


def table3(runs: tuple[Run, ...]) -> Table:
    """External clients: both ways of training, both statistics at the test."""
    rows = {}
    for label, method in METHODS.items():
        for folder in SHARES:
            for ours, adaptation in (("", "running"), (OURS, TRACKED)):
                name, row = external_name(label, folder, ours)
                numbers = printed("3", name)
                rows[row] = tuple(
                    Cell(
                        names(runs, f"external/{TYPE_OF[domain]}/{method}/{folder}"),
                        domain,
                        numbers.get(column),
                        adaptation,
                    )
                    for column, domain in EXTERNAL.items()
                )
    title = "Table 3: external clients, one type of corruption left out"
    return Table("table3", title, tuple(EXTERNAL), rows)


def external_name(label: str, folder: str, ours: str) -> tuple[str, str]:
    """A row of Table 3: its name in the paper, and in ours."""
    if folder == "averaged":
        return label + ours, label + ours
    if label == "FedAvg":
        return f"FedBN{ours}", f"FedBN{ours}"
    return "", f"{label}, trained with own batch norm{ours}"


def fig5_tables() -> list[Table]:
    """Camelyon17: internal hospitals with their own models, external ones both ways."""
    inside, outside = {}, {}
    for label, method in METHODS.items():
        for folder, ours in (("averaged", ""), ("own", OURS)):
            own = names(RUNS, f"camelyon17/{method}/{folder}")
            inside[label + ours] = tuple(Cell(own, domain) for domain in HOSPITALS.values())
        own = names(RUNS, f"camelyon17/{method}/averaged")
        for ours, adaptation in (("", "running"), (OURS, TRACKED)):
            outside[label + ours] = tuple(
                Cell(own, domain, None, adaptation) for domain in OUTSIDE.values()
            )
    return [
        Table("fig5a-numbers", "Fig. 5a: internal hospitals", tuple(HOSPITALS), inside),
        Table("fig5b-numbers", "Fig. 5b: external hospitals", tuple(OUTSIDE), outside),
    ]


def convergence(runs: tuple[Run, ...]) -> Figure:
    """Fig. 3: training loss of every client and its mean, a panel an algorithm."""
    panels = {
        label: {
            f"{folder} batch norm": names(runs, f"internal/{method}/{folder}") for folder in SHARES
        }
        for label, method in METHODS.items()
    }
    every = tuple(n for panel in panels.values() for own in panel.values() for n in own)
    draw = partial(figures.convergence, panels=panels)
    return Figure("fig3", "Fig. 3: convergence on internal clients", every, draw)


def all_figures() -> list[Figure]:
    """Figures 3, 5 and 6."""
    bars = [
        Figure(
            table.name.removesuffix("-numbers"),
            table.title,
            tuple(dict.fromkeys(n for row in table.rows.values() for c in row for n in c.runs)),
            partial(figures.accuracy_bars, table=table),
        )
        for table in fig5_tables()
    ]
    kinds = {
        "fig6a": ("one batch at a time", "batch size", "batch:batch_size={}", BATCHES),
        "fig6b": ("momentum", "momentum", "tsmobn:momentum={}", MOMENTA),
        "fig6c": ("order of the samples", "random order", "tsmobn:order={}", ORDERS),
    }
    return [convergence(RUNS), *bars, *(ablation(name, *kind) for name, kind in kinds.items())]


def ablation(name: str, what: str, label: str, spelled: str, settings: tuple) -> Figure:
    """A part of Fig. 6, on both external hospitals, of models trained with averaged batch norm."""
    runs = names(RUNS, ABLATED)
    draw = partial(
        figures.adaptations,
        runs=runs,
        domains=OUTSIDE,
        label=label,
        spelled={setting: spelled.format(setting) for setting in settings},
        logarithmic=name == "fig6a",
    )
    return Figure(name, f"Fig. {name.removeprefix('fig')}: {what}", runs, draw)


def tables() -> list[Table]:
    """Tables 2 and 3, and the numbers of Fig. 5."""
    return [table2(RUNS), table3(RUNS), *fig5_tables()]


SWEEP = Sweep("UniFed (Jiang et al.)", RUNS, tables, all_figures)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
