"""FedIG's Tables 1 to 3 and 5 to 12, Fig. 4 to 10 (FedIG-A, A.1 to A.7).

    python launch/sweeps/fedig.py [--only "Table 5"] [--data FOLDER] [--dry-run]     see sweep.py

NAMEs of data: pacs, vlcs and officehome, as their config files take data.path; and resnet18, a file
of ResNet-18's ImageNet weights by torchvision's names, which you supply: --data.resnet18=FILE.
--config.pretrained= starts at random instead, and the report states it. CAFL is a mean over
features and not the printed sum, which diverges (configs/pacs.py). Four seeds (section 4.1). Table
4 is a benchmark, benchmarks/fedig_costs.py.

FedIG is a run of FedIG-A that is tested without its adapter, because the adapter does not change
the main network. Each domain is left out in turn; averages are over targets, by seed. Table 12
tests FedIG-A's runs on their internal clients: a client's number is the mean over the three targets
that leave it inside. The test uses the validation samples that chose the round, because DomainBed's
split, which the paper follows, has no test samples, and the text names none;
--config.data.test=0.1 keeps some for the test. FedProx has mu = 0.1 everywhere, the value that the
text names for Table 3a. Fig. 5 and 6 print no values: their lambdas are points around the ranges of
A.1. The text does not state how the methods of domain generalization were made federated: here
FedAvg has their objectives, with our defaults, whose sources their docstrings name; RandAug is for
DomainBed's augmentation. FedDG shows each client the means of 64 images of every other client, as
many as a batch.
"""

import sys
from functools import partial

import domains
import figures
import plan
from plan import Column, Figure, Protocol, Row, Table, Training, left_out, table, training
from sweep import main

DOMAINS = {name: domains.DOMAINS[name.lower()] for name in ("PACS", "VLCS", "OfficeHome")}
SEEDS = 4
SPECTRA = 64  # images of a client whose means FedDG shows to others: one batch
ADAPTER = "zero_shot_adapter"
# Row of Table 3c, a test of FedIG-A's runs -> adaptation.
INFERENCE = {
    "FedIG + ensemble BNs": "ensemble",
    "FedIG + IABN": "iabn",
    "FedIG + MixNorm": "mixnorm",
    "FedIG + random alpha": "random_alpha",
    "FedIG + fixed alpha 0.5": "fixed_alpha",
    "FedIG-A (zero-shot adapter)": ADAPTER,
}
LAMBDA_1 = (0.01, 0.1, 0.3, 0.5, 1.0)
LAMBDA_2 = (0.5, 1.0, 2.0, 4.0, 5.0, 8.0)
INSIDE = plan.Evaluation("inside", {}, ("--internal", "--alphas", "--tsne"))
RANGES = {
    "FedIG-A, u ~ U(0.0, 0.5)": "uniform:low=0.0:high=0.5",
    "FedIG-A, u ~ U(0.5, 1.0)": "uniform:low=0.5:high=1.0",
    "FedIG-A, u ~ U(-0.1, 1.1)": "uniform:low=-0.1:high=1.1",
}


def plain(method: str, folder: str = "", **keys: object) -> Training:
    """Returns a method that is tested with running statistics, with keys of the config."""
    return training(method, folder, adaptations=("running",), **keys)


def adapted(method: str, folder: str = "") -> Training:
    """Returns FedIG-A, tested with and without its adapter."""
    return training(method, folder, adaptations=("running", ADAPTER))


FEDAVG, FEDPROX, FEDBN = plain("fedavg"), plain("fedprox:mu=0.1"), plain("fedbn")
SERVED = ("running", *dict.fromkeys(INFERENCE.values()))
FEDIGA = training("fediga", tests=(INSIDE,), adaptations=SERVED)
BIN = training("fedig:gates=True", "bin", adaptations=("learned_alpha",))
COPA = training("copa", adaptations=("learned_alpha",))


def protocol(dataset: str) -> Protocol:
    """Returns a protocol that leaves out one domain of a data set after the other."""
    name = dataset.lower()
    needs = {"data.path": name, "pretrained": "resnet18"}
    columns = left_out(DOMAINS[dataset])
    return Protocol(name, f"configs/{name}.py", columns, SEEDS, needs, {})


where = partial(plan.where, "FedIG-A")


PROTOCOLS = {dataset: protocol(dataset) for dataset in DOMAINS}
PACS = PROTOCOLS["PACS"]
METHODS: dict[str, Row | Training | str] = {
    "FedAvg": FEDAVG,
    "FedProx": FEDPROX,
    "FedBN": FEDBN,
    "RandAug": plain("fedavg", "randaug", data__augment="randaug"),
    "Mixstyle": plain("mixstyle"),
    "SFA": plain("sfa"),
    "RandConv": plain("randconv"),
    "L2D": plain("l2d"),
    "JiGen": plain("jigen"),
    "RSC": plain("rsc"),
    "SelfReg": plain("selfreg"),
    "COPA": Row((COPA,), "learned_alpha"),
    "FedDG": plain(f"feddg:spectra={SPECTRA}"),
    "CSAC": plain("csac"),
    "FedIG": FEDIGA,
    "FedIG-A": Row((FEDIGA,), ADAPTER),
}
MIXING = {
    "FedBN": FEDBN,
    "FedIG, Global: u = 0.0": plain("fedig:mixing=constant:u=0.0", "fedig-u0"),
    "FedIG, Instance: u = 1.0": plain("fedig:mixing=constant:u=1.0", "fedig-u1"),
    "FedIG, Global & instance: u = 0.5": plain("fedig:mixing=constant:u=0.5", "fedig-u0.5"),
    "FedIG, Global & instance: u ~ U(0, 1)": FEDIGA,
}
LOSSES = {
    "FedBN": FEDBN,
    "FedIG, CACL": plain("fedig:lambda_2=0.0", "fedig-cacl"),
    "FedIG, CAFL": plain("fedig:lambda_1=0.0", "fedig-cafl"),
    "FedIG, CAFL+CACL": FEDIGA,
}
COMPONENTS = {
    "FedBN": FEDBN,
    "FedBN + FedProx": plain("fedprox:mu=0.1", "fedbn-fedprox", share="all_but_batch_norm"),
    "FedBN + MixStyle + CAL": plain("fedig:mixing=mixstyle", "fedig-mixstyle"),
    "FedIG": FEDIGA,
    "FedIG + BIN (learned alpha)": Row((BIN,), "learned_alpha"),
    **{label: Row((FEDIGA,), adaptation) for label, adaptation in INFERENCE.items()},
}
UNIFORM = {
    "FedIG-A, u ~ U(0, 1)": Row((FEDIGA,), ADAPTER),
    **{
        label: Row(
            (adapted(f"fediga:mixing={mixing}", f"fediga-{mixing.replace(':', '-')}"),), ADAPTER
        )
        for label, mixing in RANGES.items()
    },
}
THIRTY = adapted("fediga")
CROWDED = {  # folder -> changes of configs/pacs_30_clients.py
    "iid": {},
    "dirichlet0.5": {"data.partition": "dirichlet:alpha=0.5"},
    "dirichlet0.1": {"data.partition": "dirichlet:alpha=0.1"},
}


def methods_on(dataset: str) -> dict[str, Row | Training | str]:
    """Returns the rows of Tables 5, 7 and 8; MixStyle's authors mix fewer layers on OfficeHome."""
    fewer = {"Mixstyle": plain("mixstyle:names=layer1,layer2")}
    return METHODS | (fewer if dataset == "OfficeHome" else {})


def crowd(folder: str) -> Protocol:
    """Returns the protocol of 30 clients, ten of which train in a round."""
    name, config = f"pacs_30_clients/{folder}", "configs/pacs_30_clients.py"
    return PACS._replace(name=name, config=config, changes=CROWDED[folder])


def crowded(number: int, folder: str) -> Table:
    """Returns one of Tables 9 to 11."""
    rows = {"FedProx": FEDPROX, "FedBN": FEDBN, "FedIG-A": Row((THIRTY,), ADAPTER)}
    title = f"Table {number}: 30 clients, {folder}"
    return table(f"table{number}", title, crowd(folder), rows, where(number), average="Avg")


def inside(dataset: str) -> Table:
    """Returns Table 12: FedIG-A's runs on their own clients."""
    domains = DOMAINS[dataset]
    columns = {
        heading: Column(tuple(t for t in domains.values() if t != domain), domain)
        for heading, domain in domains.items()
    }
    columns["Avg"] = Column(tuple(domains.values()), plan.MEAN)
    rows = {
        "FedIG (local statistics)": Row((FEDIGA,), plan.OWN, test=INSIDE.name),
        "FedIG (global statistics)": Row((FEDIGA,), "running", test=INSIDE.name),
        "FedIG-A (global statistics)": Row((FEDIGA,), ADAPTER, test=INSIDE.name),
    }
    return table(
        f"table12-{dataset.lower()}",
        f"Table 12: clients inside the federation, {dataset}, on the samples that chose the round",
        PROTOCOLS[dataset]._replace(columns=columns),
        rows,
        where(12, dataset=dataset),
    )


def lambdas(key: str, number: int, values: tuple[float, ...], usual: float) -> Figure:
    """Returns Fig. 5 or 6: FedIG-A over one lambda, a row for each target."""
    made = {v: adapted(f"fediga:{key}={v}", f"fediga-{key}-{v}") for v in values}
    made[usual] = FEDIGA  # the same runs as in the tables
    rows = {
        f"{heading}, FedIG-A": tuple(PACS.cell(Row((one,), ADAPTER), c) for one in made.values())
        for heading, c in PACS.columns.items()
    }
    title, runs = f"Fig. {number}: {key} on PACS", PACS.runs(made.values())
    return figures.line_figure(Table(f"fig{number}", title, (*map(str, values),), rows, runs), key)


TABLES = (
    table("table1", "Table 1: variants of MixIG", PACS, MIXING, where(1), average="Avg"),
    table("table2", "Table 2: objectives", PACS, LOSSES, where(2), average="Avg"),
    table("table3", "Table 3: components", PACS, COMPONENTS, where(3), average="Avg"),
    *(
        table(f"table5-{d.lower()}", f"Table 5: {d}", p, methods_on(d), where(5, dataset=d), "Avg")
        for d, p in PROTOCOLS.items()
    ),
    *(
        table(
            *(f"table6-{d.lower()}", f"Table 6: MixIG's distribution, {d}", PROTOCOLS[d], UNIFORM),
            *(where(6, dataset=d), "Avg"),
        )
        for d in ("PACS", "VLCS")
    ),
    table("table7", "Table 7: VLCS", PROTOCOLS["VLCS"], METHODS, where(7), "Avg"),
    table(
        "table8",
        "Table 8: OfficeHome",
        PROTOCOLS["OfficeHome"],
        methods_on("OfficeHome"),
        where(8),
        "Avg",
    ),
    *(crowded(number, folder) for number, folder in zip((9, 10, 11), CROWDED, strict=True)),
    *map(inside, DOMAINS),
)


def first(dataset: str, target: str) -> str:
    """Returns the path, without its ending, of the first seed's evaluation of FedIG-A."""
    return f"{PROTOCOLS[dataset].names(target, FEDIGA)[0]}/evaluations/{INSIDE.name}"


def alphas(number: int, dataset: str) -> Figure:
    """Returns one of Fig. 7 to 9: the adapter's alphas on each domain that is left out."""
    files = [f"{first(dataset, d)}-alphas-*.png" for d in DOMAINS[dataset].values()]
    title = f"Fig. {number}: alphas on {dataset}"
    runs = PROTOCOLS[dataset].runs([FEDIGA])
    return Figure(f"fig{number}", title, runs, partial(figures.pictures, files=files))


def partitions() -> Figure:
    """Returns Fig. 10: samples by class and client, with photographs left out."""
    photo = {"P": Column(("photo",), "photo")}
    protocols = [crowd(folder)._replace(columns=photo) for folder in CROWDED]
    files = [f"{p.names('photo', THIRTY)[0]}/plots/class_counts.png" for p in protocols]
    runs = tuple(run for p in protocols for run in p.runs([THIRTY]))
    draw = partial(figures.pictures, files=files)
    return Figure("fig10", "Fig. 10: classes of the 30 clients, photo left out", runs, draw)


PAINTINGS = [f"{first('PACS', 'art_painting')}-{kind}-*.png" for kind in ("alphas", "tsne")]
FIGURES = (
    Figure(
        "fig4",
        "Fig. 4: alphas and t-SNE, art paintings left out",
        PACS._replace(columns={"A": PACS.columns["A"]}).runs([FEDIGA]),
        partial(figures.pictures, files=PAINTINGS),
    ),
    lambdas("lambda_1", 5, LAMBDA_1, 0.1),
    lambdas("lambda_2", 6, LAMBDA_2, 4.0),
    *(alphas(number, dataset) for number, dataset in zip((7, 8, 9), DOMAINS, strict=True)),
    partitions(),
)
SWEEP = plan.Sweep("fedig", "FedIG-A (FedIG: client-agnostic learning)", TABLES, FIGURES)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
