"""TsmoBN's Tables 1 to 4 and E.4 to E.13, Fig. 2 to 4 and E.3 to E.5 (Jiang et al., 2021).

    python launch/sweeps/tsmobn.py [--only "Table 1"] [--data FOLDER] [--dry-run]     see sweep.py

NAMEs of data: digits_dg, cifar10_c and camelyon17, as their config files take data.path; and
alexnet, a file of AlexNet's ImageNet weights by torchvision's names, which you supply:
--data.alexnet=FILE. --config.pretrained= starts at random instead, and the report states it.

There are three seeds, 0, 1 and 2 (E.2.2). Runs on CIFAR-10-C and Camelyon17 stop when ten rounds
bring no better validation accuracy; images of CIFAR-10-C have 256 pixels a side (E.1). Each of its
four types of corruption is left out in turn: `--only "Table 1"` makes all four, and `--only
'cifar10_c/noise/*'` one. Tables E.11 and E.12 test the same models on four more corruptions,
without further training. Fig. 3 and E.3 to E.5 test the FedAvg models of Tables E.7 and 1 with
other batch sizes, momenta and orders, and all methods without their affine. Fig. E.5 has five
orders (E.2.4); Fig. 3c has ten, our choice, each with a box over the seeds. Fig. 2 shows the two
unseen hospitals; its caption names the three training clients too, whose numbers are not printed.
Fig. E.1, E.2 and E.6 show samples of the data, which launch/pictures.py draws.

Decisions where the paper is silent, all of them defaults here: FedProx's mu is 0.01, as in FedBN's
experiments on digits. FedAdam's eta is 0.01 (our choice), its tau 0.001 and its betas 0.9 and 0.99.
RandConv mixes, and its consistency loss has weight 10, as in its authors' script for digits.
JiGen's order loss has weight 0.7, and nine of ten images stay whole, both within the ranges of its
authors' scripts. CSD has the values of its authors' code for PACS. Clients weigh by size (Eq. 1),
and DenseNet-121 starts at random. An unseen client receives the mean of the clients' batch norms,
with FedBN too; UniFed's Table 3 prints the same numbers for a global model whose batch norms are
not updated (unifed.py).

FedNova equals FedAvg up to rounding where all clients have equally many samples and epochs: on
CIFAR-10-C, on Digits-DG and on the truncated Camelyon17. In Tables 1, E.5, E.7, E.11 and E.12 its
74 numbers can thus only be FedAvg's, from which some printed ones are far (75.82 and 58.30 on
gaussian noise in Table 1). The hospitals of Table E.4 are not cut.

One difference from the text: the lists in E.2.2 exchange the names of CIFAR-10-C and Camelyon17, so
here Tables E.6, E.7, E.9 and E.10 follow their columns. The numbers without deviations in Tables 1
to 4 are those of Tables E.5 to E.10.
"""

import sys
from collections.abc import Sequence
from functools import partial

import figures
import plan
from domains import DOMAINS, TYPE_OF
from plan import Column, Evaluation, Protocol, Row, Table, columns_of, table, training
from sweep import main

from fedjax_bn.data.sets.cifar10_c import EXTRA, TYPES

CORRUPTIONS = {
    heading: Column((TYPE_OF[domain],), domain) for heading, domain in DOMAINS["cifar10_c"].items()
}

METHODS = ("FedAvg", "FedProx", "FedNova", "FedAdam", "FedBN")
GENERALIZING = ("JiGen", "CSD", "RandConv")
TSMOBN = "+TsmoBN"  # after a method's name in the published tables
SEEDS = 3
AFFINE = ("running", "tsmobn", "tsmobn:affine=False")

NO_AFFINE = Evaluation("affine", {"adaptations": AFFINE})
EXTRAS = Evaluation("extra", {"data.domains": EXTRA, "target": "extra"})


def both(
    *tests: Evaluation, orders: Sequence[int] = (), test: str = "", methods: Sequence[str] = METHODS
) -> dict[str, Row]:
    """Returns two rows for each method, with running statistics and with TsmoBN.

    Args:
      *tests: the tests of all runs.
      orders: the orders of samples in the ablations of FedAvg's runs; empty: no ablations.
      test: the test that has the rows' numbers; "" for the summary.
      methods: the names of the methods.
    """
    rows = {}
    for label in methods:
        ablated = orders and label == "FedAvg"
        own = (*tests, figures.ablations(AFFINE, orders)) if ablated else tests
        one = training(label.lower(), tests=own)
        rows[label] = Row((one,), "running", test=test)
        rows[label + TSMOBN] = Row((one,), "tsmobn", test=test)
    return rows


def generalizing(*tests: Evaluation, test: str = "") -> dict[str, Row]:
    """Returns rows of the methods of domain generalization."""
    return both(*tests, test=test, methods=GENERALIZING)


where = partial(plan.where, "TsmoBN")


def camelyon(name: str, changes: dict[str, object]) -> Protocol:
    """Returns a protocol of Camelyon17: three hospitals train, two are unseen."""
    needs, columns = {"data.path": "camelyon17"}, columns_of(DOMAINS["camelyon17"])
    return Protocol(name, "configs/camelyon17.py", columns, SEEDS, needs, changes)


LEFT_OUT_DIGITS = Protocol(
    *("digits_dg", "configs/digits_dg.py", plan.left_out(DOMAINS["digits_dg"]), SEEDS),
    *({"data.path": "digits_dg"}, {}),
)
CIFAR = Protocol(
    *("cifar10_c", "configs/cifar10_c.py", CORRUPTIONS, SEEDS),
    *({"data.path": "cifar10_c", "pretrained": "alexnet"}, {"data.image_size": 256}),
)
BALANCED = camelyon("camelyon17/balanced", {})
IMBALANCED = camelyon("camelyon17/imbalanced", {"data.truncate": False})
CIFAR_ROWS = both(EXTRAS, orders=figures.ORDERS[:5])
CAMELYON_ROWS = both(NO_AFFINE, orders=figures.ORDERS)


def extra_tables() -> list[Table]:
    """Returns Tables E.11 to E.13: the models of Table 1 on four more corruptions."""
    found = []
    for kind, number in (("noise", 11), ("blur", 11), ("weather", 12), ("digital", 12)):
        protocol = CIFAR._replace(columns=columns_of({name: name for name in EXTRA}, kind))
        setting = f"trained with {kind} left out"
        rows = both(EXTRAS, orders=figures.ORDERS[:5], test=EXTRAS.name)
        others = generalizing(EXTRAS, test=EXTRAS.name)
        for table_number, shown in ((f"E.{number}", rows), ("E.13", others)):
            title = f"Table {table_number}: four more corruptions, {setting}"
            printed = where(table_number, setting=setting)
            found.append(table(f"table{table_number}-{kind}", title, protocol, shown, printed))
    return found


def affine_table() -> Table:
    """Returns the table of Fig. 3d: every method with and without its trained affine."""
    rows = {}
    for label in METHODS:
        row = CAMELYON_ROWS[label]
        rows[label] = row._replace(adaptation="tsmobn", test=NO_AFFINE.name)
        rows[f"{label}, no affine"] = row._replace(adaptation=AFFINE[-1], test=NO_AFFINE.name)
    return table("fig3d-numbers", "Fig. 3d: without the affine", BALANCED, rows)


def compared(number: str, title: str, protocol: Protocol, rows: dict[str, Row]) -> Table:
    """Returns a table beside the published table `number`, such as "E.7"."""
    return table(f"table{number}", title, protocol, rows, where(number))


E7 = compared("E.7", "Table E.7: Camelyon17", BALANCED, CAMELYON_ROWS)
AGAINST = "Camelyon17, domain generalization"
E10 = compared("E.10", f"Table E.10: {AGAINST}", BALANCED, generalizing())
FIG_3D = affine_table()
ON_CIFAR = {"FedAvg": CIFAR_ROWS["FedAvg"], **generalizing(EXTRAS)}
ON_DIGITS = {"FedAvg": both()["FedAvg"], **generalizing()}
TABLES = (
    table(
        "tableE.6", "Table 1, Table E.6: CIFAR-10-C, a type left out", CIFAR, CIFAR_ROWS, where("1")
    ),
    compared("E.4", "Table E.4: Camelyon17, uncut", IMBALANCED, both()),
    compared("E.5", "Table 2, Table E.5: Digits-DG", LEFT_OUT_DIGITS, both()),
    E7,
    compared(
        *("E.8", "Table 3, Table E.8: Digits-DG, domain generalization"),
        *(LEFT_OUT_DIGITS, ON_DIGITS),
    ),
    compared("E.9", "Table 4, Table E.9: CIFAR-10-C, domain generalization", CIFAR, ON_CIFAR),
    E10,
    *extra_tables(),
    FIG_3D,
)


def by_type(name: str, kind: str) -> list[plan.Figure]:
    """Returns the figures of an ablation on CIFAR-10-C, one for each type of corruption."""
    one, found = CIFAR_ROWS["FedAvg"].trainings[0], []
    for left in TYPES:
        columns = {h: c for h, c in CORRUPTIONS.items() if c.targets == (left,)}
        found.append(figures.ablation_figure(f"{name}-{left}", kind, CIFAR, one, columns))
    return found


TESTED = CAMELYON_ROWS["FedAvg"].trainings[0]
FIGURES = (
    figures.bar_figure("fig2", "Fig. 2: Camelyon17", E7),
    *(figures.ablation_figure(f"fig3{k}", k, BALANCED, TESTED, BALANCED.columns) for k in "abc"),
    figures.bar_figure("fig3d", FIG_3D.title, FIG_3D),
    figures.bar_figure("fig4", f"Fig. 4: {AGAINST}", E10),
    *by_type("figE.3", "a"),
    *by_type("figE.4", "b"),
    *by_type("figE.5", "five"),
)
SWEEP = plan.Sweep("tsmobn", "TsmoBN (Jiang et al., 2021)", TABLES, FIGURES)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
