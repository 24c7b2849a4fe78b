"""Serves unseen clients with every adaptation, on random and on sorted streams, batches of 1 to 64.

    python launch/sweeps/streams.py --digits DIGITS.npz --pacs PACS [--only fax,...] [--workdir DIR]

The settings are the scanners with fax left out (`fax`), the same images at 0.3 of their contrast
(`fax-pale`), the digits with MNIST left out (`mnist`), and PACS at 32x32 pixels with the sketches
left out (`sketch`), all with SmallCNN. Data without a path are left out. FedAvg is trained once for
each seed, and FedIG-A too, which the zero-shot adapter needs; both settings of the scanners share
their runs. A stream is 320 images of the unseen domain, or all of fewer, in a random order, and the
same images sorted by class. Every adaptation starts at the received model.

The rates of "atp, learned" are learned in five rounds on training images of the clients, five
batches of 32 each, with eta = 0.003, because the authors' 0.1 diverges on the scanners; the paper
takes images that did not train the model. Left out are `learned_alpha`, which needs gates
from training, `ensemble`, which is `running` after FedAvg, and `initial`, a row of UniFed.

Runs and accuracies (DIR/RUN/streams-SETTING.json) are not made twice, so the same command
continues. The last lines are the table, means over seeds in percent with batches of 1 / 8 / 64, or
one number if they are equal.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import all_methods
import jax
import jax.numpy as jnp
import numpy as np
import plan
import unseen
from fedcd_small import SMALL_PACS

from fedjax_bn.adaptation import Adaptation, atp, learn_rates
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.data.domain import Split, select, whole
from fedjax_bn.federation import global_variables
from fedjax_bn.run import train
from fedjax_bn.run.files.finished_run import restore_state
from fedjax_bn.sharing import Variables, without
from fedjax_bn.training.evaluation.scoring import SplitBatches, in_order, score_unseen
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.workdir import write_atomically

SIZES, LENGTH, ORDERS = (1, 8, 64), 320, ("random", "sorted")
Score = Callable[..., float]
LEARNED = "atp, learned"
SERVED = {
    "fedavg": (
        *("running", "batch", "tsmobn", "fixed_alpha", "random_alpha", "iabn", "mixnorm"),
        *("tent", "tent:rate=0.01", "sar", "sar:rate=0.01", "shot", "shot:rate=0.01"),
        *("t3a", "atp", "atp:rate=0.01", LEARNED),
    ),
    "fediga": ("running", "zero_shot_adapter"),
}


class Setting(NamedTuple):
    """A federation and its unseen client."""

    data: str  # the name of the data's option; "" for data that need no path
    config: str  # the config file
    target: str  # the domain that is left out
    seeds: int  # the number of seeds
    changes: dict[str, Any]  # the changes of the config
    severity: int = 0  # of the corruption "contrast" of the unseen images, 1 to 5; 0 for none


SCANNERS = Setting(
    *("", "configs/quickstart.py", "fax", 3),
    all_methods.SMALL | all_methods.BENCHES["scanners"].changes | {"optimizer.learning_rate": 0.1},
)
SETTINGS = {
    "fax": SCANNERS,
    "fax-pale": SCANNERS._replace(severity=4),
    "mnist": Setting("digits", "configs/digits.py", "mnist", 3, unseen.DIGITS_KEYS),
    "sketch": Setting("pacs", SMALL_PACS.config, "sketch", 1, SMALL_PACS.changes),
}


def trained(
    setting: Setting, method: str, seed: int, path: str, folder: Path
) -> tuple[Experiment, Variables]:
    """Returns a run, trained now unless it is in its folder, and what its unseen client receives.

    Args:
      path: of the data; "" for data that need none.
    """
    own = {"method": method, "seed": seed, "target": setting.target, "adaptations": "running"}
    changes = setting.changes | own | ({"data.path": path} if path else {})
    config = plan.configuration(setting.config, changes)
    train.run(config, folder, modules=False)
    experiment, _, start = train.prepare(config)
    state, _ = restore_state(folder, jax.eval_shape(start))
    return experiment, global_variables(state)


def _with_less_contrast(images: np.ndarray, severity: int) -> np.ndarray:
    """Returns images u8[N, H, W, C] with the contrast of CIFAR-10-C's severity, 1 to 5."""
    share = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    images = images / 255
    means = images.mean(axis=(1, 2), keepdims=True)
    pale = np.clip((images - means) * share + means, 0, 1)
    return (pale * 255 + 1e-6).astype(np.uint8)  # 1e-6, so that k/255 stays k


def streams(experiment: Experiment, severity: int) -> dict[str, Split]:
    """Returns order -> the unseen client's stream; see `Setting` for the severity."""
    (domain,) = experiment.unseen
    split = in_order(whole(domain), 0)
    split = select(split, np.arange(min(LENGTH, len(split.images))))
    if severity:
        split = split._replace(images=_with_less_contrast(np.asarray(split.images), severity))
    return {"random": split, "sorted": select(split, np.argsort(split.labels, kind="stable"))}


def learned(experiment: Experiment, variables: Variables) -> Variables:
    """Returns rates of `atp`, learned on training images of the clients."""
    parts = [in_order(domain.train, 0) for domain in experiment.internal.domains]
    images = jnp.stack([np.asarray(part.images[:160]) for part in parts])
    labels = jnp.stack([part.labels[:160] for part in parts])
    batches = {"image": images, "label": labels, "valid": jnp.ones(labels.shape, bool)}
    batches = {k: v.reshape(len(parts), 5, 32, *v.shape[2:]) for k, v in batches.items()}
    batches["image"] = experiment.prepare(batches["image"], jnp.float32)
    return learn_rates(experiment.model, variables, batches, rate=0.003, rounds=5)


def chosen(text: str, model: Any) -> Adaptation:
    """Returns the adaptation of a text, or ATP by the learned rates in the collection `rates`."""
    if text != LEARNED:
        return choose_adaptation(text, model).adaptation

    def predict(variables: Variables, carry: Any, images: jax.Array, valid: jax.Array) -> tuple:
        made = atp(model, variables["rates"])
        return made.predict(without(variables, "rates"), carry, images, valid)

    return Adaptation(lambda variables: atp(model).init(without(variables, "rates")), predict)


def measured(
    experiment: Experiment,
    variables: Variables,
    texts: Iterable[str],
    scores: dict[str, Score],
    severity: int,
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yields each adaptation with order -> percent with batches of each size.

    Args:
      experiment, variables: as from `trained`.
      texts: the adaptations.
      scores: adaptation -> its score; new ones are added, whose programs later seeds share.
      severity: see `Setting`.
    """
    data = {
        (order, size): SplitBatches([split], size).all_at_once()
        for order, split in streams(experiment, severity).items()
        for size in SIZES
    }
    for text in texts:
        if text not in scores:
            adaptation = chosen(text, experiment.model)
            scores[text] = score_unseen(adaptation, experiment.prepare)
        score, given = scores[text], variables
        if text == LEARNED:
            given = {**variables, "rates": learned(experiment, variables)}
        yield text, {o: [score(given, data[o, s]) for s in SIZES] for o in ORDERS}


def table(rows: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Returns a table in Markdown of the means over seeds, with one cell for the three sizes.

    Args:
      rows: label -> setting -> percent f[seeds, orders, sizes].
    """
    settings = [*dict.fromkeys(name for row in rows.values() for name in row)]
    heads = ["adaptation", *(f"{name}, {order}" for name in settings for order in ORDERS)]
    lines = [heads, ["---", *("---:",) * (len(heads) - 1)]]
    for label, row in rows.items():
        means = [row[name].mean(0) for name in settings]  # all rows have all settings
        texts = [[f"{value:.1f}" for value in sizes] for one in means for sizes in one]
        cells = [one[0] if len({*one}) == 1 else " / ".join(one) for one in texts]
        lines.append([label, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--digits", default="", help="an .npz, see configs/digits.py")
    parser.add_argument("--pacs", default="", help="a folder, see configs/pacs.py")
    parser.add_argument("--only", default=",".join(SETTINGS), help="settings, with commas")
    parser.add_argument("--workdir", type=Path, default=Path("runs") / "streams")
    options = parser.parse_args(arguments)
    rows: dict[str, dict[str, list]] = {}
    scores: dict[tuple[str, str], dict[str, Score]] = {}
    for name in options.only.split(","):
        setting = SETTINGS[name]
        path = getattr(options, setting.data) if setting.data else ""
        if setting.data and not path:
            print(f"{name}: left out, for lack of --{setting.data}", file=sys.stderr)
            continue
        for seed, (method, texts) in product(range(setting.seeds), SERVED.items()):
            folder = options.workdir / setting.target / method / str(seed)
            file = folder / f"streams-{name}.json"
            found = json.loads(file.read_text()) if file.exists() else {}
            if missing := [text for text in texts if text not in found]:
                run = trained(setting, method, seed, path, folder)
                known = scores.setdefault((setting.target, method), {})
                for text, by_order in measured(*run, missing, known, setting.severity):
                    found[text] = by_order
                    write_atomically(file, json.dumps(found))
            for text in texts:
                label = f"FedIG-A, {text}" if method == "fediga" else text
                values = [found[text][order] for order in ORDERS]
                rows.setdefault(label, {}).setdefault(name, []).append(values)
    arrays = {label: {n: np.array(v) for n, v in row.items()} for label, row in rows.items()}
    print(table(arrays))
    spread = [v.std(0, ddof=1) for row in arrays.values() for v in row.values() if len(v) > 1]
    if spread:
        print(
            f"\nDeviation between seeds: median {np.median(spread):.1f}, "
            f"at most {np.max(spread):.1f}."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
