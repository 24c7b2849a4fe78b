"""Defines all keys of the configuration: type, default, range and meaning.

A key means the same everywhere. The keys of methods, such as `fedprox.mu`, come from the methods'
signatures and docstrings. `fedjax-bn list keys` prints all keys.
"""

import inspect
import re
from functools import cache
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from fedjax_bn.arguments.choices import REQUIRED, Argument, plain_arguments
from fedjax_bn.arguments.ranges import (
    BY_KIND,
    GREYS,
    Above0,
    Alpha,
    AtLeast0,
    Fraction,
    Inside,
    Pixels,
    Range,
    Rounds,
    RoundsOr0,
    Samples,
    SamplesOr0,
    Seed,
    Share,
    Steps,
    StepsOr0,
    UpTo1,
    one_of,
    stated_range,
)
from fedjax_bn.data.division.forms import PARTITION, PROSTATE, SIZES
from fedjax_bn.run.config.key_ranges import (
    EPOCHS,
    EXPRESSION,
    FOLDER,
    FOLDER_OR_BUCKET,
    PATH,
    PATTERNS,
    WINDOW,
)


def _key(default: Any, meaning: str, allowed: Any = None) -> Argument:
    """Returns a key; `allowed` is a Range, a type, or None for the default's type."""
    if isinstance(allowed, Range):
        return Argument(type(default), default, allowed, meaning)
    kind = getattr(allowed, "__origin__", allowed or type(default))
    return Argument(kind, default, stated_range(allowed) or BY_KIND[kind], meaning)


def _name(meaning: str, *names: str) -> Argument:
    """Returns a key that is one of some names, the first by default."""
    return Argument(str, names[0], one_of(*names), meaning)


_KEYS = {
    "method": _key("", "`list methods`, or your own package.module:function:key=value"),
    "baselines": _key((), "methods to run beside it, each in WORKDIR/baselines/NAME"),
    "model": _key("DigitCNN", "`list models`, or your own package.module:Class:key=value"),
    "pretrained": _key("", "weights to start from: a file, or a hub id; empty: none", PATH),
    "compute_dtype": _name(
        "in which layers compute; with bfloat16, for GPU and TPU, variables, statistics of batch "
        "norms and losses are float32 (mixed precision)",
        *("float32", "bfloat16"),
    ),
    "rounds": _key(20, "rounds of the federation", Rounds),
    "local_epochs": _key(1, "passes over its own data that a client makes each round", Steps),
    "client_epochs": _key((), "of each client, in their order; empty: local_epochs", EPOCHS),
    "local_steps": _key(0, "if above 0: steps of a client each round, not epochs", StepsOr0),
    "local_selection": _key(
        0,
        "if above 0: steps between validations of a client, which then uploads its best state of "
        "the round (FedIG, A.2)",
        StepsOr0,
    ),
    "validate_with": _name(
        "the model whose validation accuracy selects the round: each client its own, or all the "
        "aggregated one (FedIG, A.2)",
        *("own", "global"),
    ),
    "patience": _key(
        0,
        "if above 0: rounds without a better validation before a run stops (TsmoBN, E.1)",
        RoundsOr0,
    ),
    "batch_size": _key(32, "samples of a step", Samples),
    "optimizer.name": _name("the clients' optimizer", "sgd", "adam"),
    "optimizer.learning_rate": _key(0.01, "of the clients' steps", Above0),
    "optimizer.schedule": _name(
        "of the learning rate over rounds", "constant", "cosine", "step", "exponential"
    ),
    "optimizer.warmup_rounds": _key(0, "in which the rate first rises to learning_rate", RoundsOr0),
    "optimizer.decay_rounds": _key(
        0,
        "rounds until a cosine ends (0: with the run), between the drops of step, and for one "
        "decay_factor of exponential",
        RoundsOr0,
    ),
    "optimizer.decay_factor": _key(0.1, "of step and exponential, every decay_rounds", Fraction),
    "optimizer.final_fraction": _key(0.0, "of learning_rate, where a cosine ends and stays", Share),
    "optimizer.momentum": _key(0.0, "sgd only", Share),
    "optimizer.nesterov": _key(False, "sgd with momentum only"),
    "optimizer.weight_decay": _key(0.0, "added to the gradient (L2), as in PyTorch", AtLeast0),
    "optimizer.keep": _key(False, "whether clients keep its state (momentum) between rounds"),
    "start_from": _key(
        "",
        "workdir of a finished run from whose model all clients start: that of its selected round, "
        "as an unseen client receives it; empty: none",
        PATH,
    ),
    "share": _key(
        "",
        "what leaves the client: everything, nothing, all_but_batch_norm, all_but_statistics, "
        "all_but_norms, all_but_head (FedPer), only_head (LG-FedAvg), or your own; empty: the "
        "method's own rule",
    ),
    "frozen": _key(
        "",
        "what nothing trains or sends: paths of modules, such as layer1,layer2; "
        "all_but:paths=head; at:paths=layer1:statistics=False, whose running statistics move; a "
        "rule as for share, such as all_but_batch_norm; or your own; empty: nothing",
    ),
    "weigh": _key(
        "",
        "by_size, uniform, by_divergence, risk_extrapolation:eta=0.5:solver=slsqp, "
        "generalization_adjustment:metric=loss:step=0.2; robust to malicious clients: "
        "coordinate_median, trimmed_mean:trim=0.25, krum:malicious=1:keep=1, "
        "geometric_median:iterations=10, norm_clipping:factor=1; or your own; empty: the method's "
        "own",
    ),
    "clients": _key("auto", "auto, map, vmap, vmap:at_once=n (n clients at a time)"),
    "mesh.clients": _key(0, "devices that clients are shared out over; 0: all, 1: one", StepsOr0),
    "mesh.batch": _key(
        0, "devices over which a batch is split; 0: as many as there are for each client", StepsOr0
    ),
    "clients_per_round": _key(0, "clients drawn to take part in a round; 0: all", StepsOr0),
    "population": _name(
        "where the clients' own parts of the state are: with host only those drawn for a round "
        "are on the device; auto: host for more than 1000, of which some take part",
        *("auto", "device", "host"),
    ),
    "participation.draw": _name(
        "how clients_per_round are drawn; by_size: with chances by their samples",
        *("uniform", "by_size"),
    ),
    "participation.trace": _key("", "file of who is available when; empty: all are", PATH),
    "participation.dropout": _key(0.0, "chance of a drawn client to drop out of the round", Share),
    "privacy.clip": _key(
        0.0,
        "if above 0: norm to which each client's update is clipped; with noise, differential "
        "privacy of clients, see docs/privacy.md",
        AtLeast0,
    ),
    "privacy.noise": _key(
        0.0, "standard deviation on shared leaves, in units of the clip", AtLeast0
    ),
    "privacy.at": _name("who adds it: once to the sum, or each to its update", "server", "client"),
    "privacy.seed": _key(None, "of it; empty: seed, over Flower numbers no one knows", Seed),
    "privacy.delta": _key(1e-5, "of (epsilon, delta); far below 1 over the clients", Inside),
    "on_nonfinite": _name(
        "what follows an update of a client, or a step of the server, that is not finite: the run "
        "stops, or it is left out; if all clients fail it stops",
        *("stop", "drop"),
    ),
    "target": _key(
        "", "the unseen domain, several (a,b) or a group of them; each: all in turn; empty: none"
    ),
    "adaptations": _key(
        ("running",), "how an unseen client predicts: `list adaptations`, name:key=value:key=value"
    ),
    "eval_every": _key(5, "rounds between evaluations; the last round is always evaluated", Rounds),
    "eval_unseen": _name(
        "when unseen clients are tested: in every evaluation, or at the end in the selected round",
        *("always", "once"),
    ),
    "eval_train_loss": _key(
        False,
        "whether evaluations take the clients' loss on their training samples too, after "
        "aggregation and without training (FedBN, Fig. 3)",
    ),
    "predictions": _name(
        "form in which a run writes its predictions of the tested samples in its selected round, "
        "answers/*-predictions: a classifier's probabilities, or the scores by volume (csv) or all "
        "masks (npz) of a network for masks; empty: none",
        *("", "csv", "npz"),
    ),
    "eval_batch_size": _key(500, "samples tested at once", Samples),
    "eval_clients": _key(0, "clients evaluated, drawn once from the seed; 0: all", StepsOr0),
    "clients_named": _key(
        100, "most clients named one by one; of more, quantiles and means by domain", Steps
    ),
    "adapt_batch_size": _key(32, "of the stream that adaptations see", Samples),
    "checkpoint_every": _key(5, "rounds between checkpoints; the last one is always kept", Rounds),
    "personalize.samples": _key(
        None,
        "labelled samples for a tested client to adapt to; empty: the method's own",
        SamplesOr0,
    ),
    "personalize.steps": _key(1, "gradient steps on them", Steps),
    "personalize.rate": _key(None, "learning rate; empty: the method's own or 0.01", AtLeast0),
    "compilation_cache": _key(
        "~/.cache/fedjax_bn/compiled",
        "folder for compiled programs; empty: none",
        FOLDER_OR_BUCKET,
    ),
    "profile": _key(
        0,
        "if above 0: the round, from 1, whose trace by jax.profiler is written to WORKDIR/profile",
        RoundsOr0,
    ),
    "wandb": _key("", "project of Weights & Biases that rounds are reported to; empty: none"),
    "seed": _key(0, "of all random numbers", Seed),
    "data.name": _key("scanners", "`list datasets`"),
    "data.path": _key("", "file or folder of a dataset that is not embedded", PATH),
    "data.image_size": _key(28, "side of the square images, pixels", Pixels),
    "data.max_megapixels": _key(100.0, "of an image file; a larger one is refused", Above0),
    "data.orientation": _name(
        "how image files are read: turned by their EXIF as viewers show them, or as stored, like "
        "torchvision; boxes refer to the image as it is read",
        *("upright", "stored"),
    ),
    "data.cache": _key("~/.cache/fedjax_bn", "folder for decoded images; empty: none", FOLDER),
    "data.device_megabytes": _key(4000, "larger sets are streamed from the host", RoundsOr0),
    "data.split": _name(
        "how a domain is split; empty: official where there is one; official holds data.validation "
        "out of digits' training samples, which empty does not",
        *("", "official", "holdout", "stratified"),
    ),
    "data.validation": _key(0.1, "share of a domain's samples", Share),
    "data.test": _key(0.0, "share of a domain's samples", Share),
    "data.truncate": _key(None, "to the smallest domain; empty: the source's own", bool),
    "data.fraction": _key(None, "of the training data; empty: the source's own", Fraction),
    "data.clients_per_domain": _key(1, "clients that share a domain's samples", Steps),
    "data.num_clients": _key(0, "of all domains, not clients_per_domain; 0: not set", StepsOr0),
    "data.partition": _key(
        "iid",
        "labels of a domain's clients; dirichlet:smallest=N: none has fewer than N samples, 10 "
        "unless it is given, where there are enough; drawn:samples=N: each draws N of its "
        "domain's, which others may have too; pooled: one client owns all",
        PARTITION,
    ),
    "data.alpha": _key(0.5, "of dirichlet; the smaller, the more unequal", Alpha),
    "data.sizes": _key(
        "",
        "of the clients: one number or one each, such as 743,7943; or drawn, lognormal:sigma=S or "
        "dirichlet:alpha=A, optionally with :smallest=N as in data.partition",
        SIZES,
    ),
    "data.augment": _key(
        "none",
        "of the training images: none, domainbed, office, randaug:ops=2:magnitude=9, "
        "boxes:flip=0.5:scale=0.5, masks:rotate=15:elastic=0.02, or your own function "
        "(size, *, ...) -> augment",
    ),
    "data.perturb": _key(
        "",
        "what training does to images once they are standardized: amplitude_mix:probability=0.5, "
        "another of fedjax_bn.engine.perturb, or your own; empty: nothing",
    ),
    "data.domains": _key((), "of boxes, folders, masks, npz, tfds_*; empty: all; see bdd100k.py"),
    "data.classes": _key(
        (),
        "boxes, domainnet, folders, tfds_*: which; empty: all (domainnet: ten); masks: their "
        "names, background first; empty: found",
    ),
    "data.large": _name(
        "of images with masks: stretched to squares of image_size, or cut into such tiles",
        *("resize", "tiles"),
    ),
    "data.pairs": _key((), "masks: patterns, see pairing.py; empty: by similar names", PATTERNS),
    "data.groups": _key(
        "",
        "folders, masks: searched in an image's path, what no split separates; see pairing.py",
        EXPRESSION,
    ),
    "data.plane": _name(
        "masks, prostate: slices of NIfTI volumes, brought to the nearest RAS axes",
        *("axial", "coronal", "sagittal"),
    ),
    "data.window": _key(
        (),
        "masks, prostate: intensities of NIfTI volumes that become black and white, such as "
        "-160,240 in CT; empty: the smallest and the 99 % quantile of each volume",
        GREYS,
    ),
    "data.max_boxes": _key(100, "boxes of an image; one with more keeps its largest", Rounds),
    "data.corruptions": _key((), "cifar10_c: which; empty: all 19"),
    "data.severities": _key((), "cifar10_c: of 1 to 5; empty: all"),
    "data.protocol": _name(
        "prostate: whose slices and parts; empty: all slices, divided by patient; see prostate.py",
        *PROSTATE,
    ),
    "detection.score": _name("what detectors report", "mAP50", "mAP50-95"),
    "detection.box": _key(0.05, "gain of the boxes in a detector's loss", AtLeast0),
    "detection.objectness": _key(1.0, "gain of objectness in it", AtLeast0),
    "detection.classes": _key(0.5, "gain of the classes in it", AtLeast0),
    "segmentation.dice": _key(0.5, "share of 1 - Dice in the loss; the rest: entropy", UpTo1),
    "segmentation.by_sample": _key(False, "whether the loss takes Dice of each sample"),
    "segmentation.nested": _key(
        False, "whether each class is inside the one before, as the cup in the disc, and scored so"
    ),
    # See load in fedjax_bn/data/sets/abide.py
    "abide.window": _key(32, "time points of a connectome; 0: all", WINDOW),
    "abide.stride": _key(1, "time points between windows", Steps),
    "abide.windows_per_subject": _key(0, "how many at most; 0: all", StepsOr0),
    "abide.fisher_z": _key(False, "whether correlations r become artanh r"),
    "abide.sites": _key((), "which; empty: all"),
    "abide.atlas": _key("", "such as cc200, where the folder has several"),
}

# Arguments that other keys set, or that turn the method into another one.
_ELSEWHERE = ("clients", "keep_optimizer", "local_epochs", "adapter")


@cache
def keys() -> dict[str, Argument]:
    """Returns all keys, dotted name -> its type, default, range and meaning.

    A method's keys are the keyword arguments whose default is a bool, a number or a text.
    """
    from fedjax_bn import methods  # imports JAX; errors in flags need not wait for it

    found = {}
    for name in methods.__all__:
        method = getattr(methods, name)
        meanings = _meanings(inspect.getdoc(method) or "")
        for key, argument in plain_arguments(method, _ELSEWHERE).items():
            # An argument without a default value, such as weigh, has a key shared by all methods.
            if argument.default not in (None, REQUIRED):
                found[f"{name}.{key}"] = argument._replace(meaning=meanings.get(key, ""))
    usual = _KEYS["method"]._replace(default=methods.USUAL)
    return _KEYS | {"method": usual} | dict(sorted(found.items()))


def _meanings(docstring: str) -> dict[str, str]:
    """Returns argument -> its text in the section `Args:` of a docstring, on one line."""
    section = re.search(r"^Args:\n((?:  .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    parts = re.split(r"^  (?=\S)", section[1] if section else "", flags=re.MULTILINE)
    pairs = (part.split(":", 1) for part in parts if ":" in part)
    return {name: " ".join(text.split()) for name, text in pairs}


def base() -> ConfigDict:
    """Returns all keys with their defaults; a config file changes what it needs."""
    nested: dict[str, Any] = {}
    for name, key in keys().items():
        group, _, last = name.rpartition(".")
        place = nested.setdefault(group, {}) if group else nested
        place[last] = placeholder(key.kind) if key.default is None else key.default
    return ConfigDict(nested)
