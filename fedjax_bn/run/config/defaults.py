"""Defines all keys of the configuration: type, default, range and meaning.

A key means the same everywhere. `fedjax-bn list keys` prints all keys.
"""

import re
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from fedjax_bn.arguments.choices import Argument
from fedjax_bn.arguments.ranges import (
    BY_KIND,
    GREYS,
    Above0,
    AtLeast0,
    Fraction,
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
    stated_range,
)
from fedjax_bn.data.division.choices import PARTITION, PROTOCOLS, SIZES


def _is_expression(pattern: str) -> bool:
    try:
        return bool(re.compile(pattern))
    except re.error:
        return False


_EPOCHS = Range(
    "whole numbers above 0 and below 100000",
    lambda entries: all(re.fullmatch("[1-9][0-9]{0,4}", str(entry)) for entry in entries),
)
# Without such a beginning, a slip such as "None" would make a folder of that name.
_FOLDER = Range(
    "empty, or a folder that begins with /, ./, ../ or ~, or a bucket such as gs://NAME",
    lambda path: not path or bool(re.match(r"\.{0,2}/|~|(gs|s3|az|hf)://.", path)),
)
_PATTERNS = Range(
    "patterns of an image and of its mask in turn, each with {} once, such as "
    "images/{}.png,masks/{}_mask.png",
    lambda texts: len(texts) % 2 == 0 and all(pattern.count("{}") == 1 for pattern in texts),
)
_MEASURED = Range("some of unseen, train_loss", lambda names: {*names} <= {"unseen", "train_loss"})
_EXPRESSION = Range("a regular expression of Python", _is_expression)


def _key(default: Any, meaning: str, allowed: Any = None) -> Argument:
    """Returns a key; `allowed` is a Range, a type, or None for the default's type."""
    if isinstance(allowed, Range):
        return Argument(type(default), default, allowed, meaning)
    kind = getattr(allowed, "__origin__", allowed or type(default))
    return Argument(kind, default, stated_range(allowed) or BY_KIND[kind], meaning)


def _name(meaning: str, *names: str) -> Argument:
    """Returns a key that is one of some names, the first by default."""
    return Argument(str, names[0], Range.one_of(*names), meaning)


# Dotted name -> type, default, range and meaning.
KEYS = {
    "method": _key(
        "fedbn",
        "The method: a name of `list methods` with its options, such as fedprox:mu=0.1, or your "
        "own package.module:function:key=value.",
    ),
    "baselines": _key((), "Methods that are run beside it, each in WORKDIR/baselines/NAME."),
    "model": _key(
        "DigitCNN",
        "The network: a name of `list models` with its options, such as ResNet18:width=16, or your "
        "own package.module:Class:key=value.",
    ),
    "task": _key(
        "",
        "What is learned: classification:class_weights=balanced, detection:class_gain=2 or "
        "segmentation:nested=True, see `list tasks`. Empty: what the labels say.",
    ),
    "pretrained": _key("", "Weights from which clients start: a file, or a name on a hub."),
    "compute_dtype": _name(
        "Type in which layers compute; variables stay float32.", "float32", "bfloat16"
    ),
    "rounds": _key(20, "Number of rounds of the federation.", Rounds),
    "local_epochs": _key(1, "Passes over its own data that a client makes in a round.", Steps),
    "client_epochs": _key((), "Epochs of each client, in order. Empty: local_epochs.", _EPOCHS),
    "local_steps": _key(0, "Steps of a client in a round, instead of epochs. 0: epochs.", StepsOr0),
    "local_selection": _key(
        0,
        "Steps between two validations of a client, which then uploads its best state of the "
        "round (FedIG, A.2). 0: its last state.",
        StepsOr0,
    ),
    "validate_with": _name(
        "Whose validation accuracy selects the round: of each client's own model, or of the "
        "aggregated one on all clients (FedIG, A.2).",
        *("own", "global"),
    ),
    "statistics": _name(
        "Statistics of batch norms with which internal clients are tested and validated: running, "
        "as training left them; or precise, which each client estimates anew, for the model that "
        "it received, from its training samples.",
        *("running", "precise"),
    ),
    "patience": _key(0, "Rounds without better validation that end a run. 0: none.", RoundsOr0),
    "batch_size": _key(32, "Number of samples of a step.", Samples),
    "optimizer.name": _key(
        "sgd", "Optimizer of the clients: sgd or adam; with a clip of gradients, sgd:clip=1."
    ),
    "optimizer.learning_rate": _key(0.01, "Full learning rate of the clients' steps.", Above0),
    "optimizer.schedule": _key(
        "constant",
        "How the rate changes over rounds: constant; cosine:rounds=N:final=F, which ends with the "
        "run unless rounds are given; step:rounds=N:factor=F; or exponential:rounds=N:factor=F.",
    ),
    "optimizer.warmup_rounds": _key(0, "Rounds in which the rate first rises.", RoundsOr0),
    "optimizer.momentum": _key(0.0, "Momentum of sgd; adam has its own.", Share),
    "optimizer.nesterov": _key(False, "Whether the momentum of sgd is Nesterov's."),
    "optimizer.weight_decay": _key(0.0, "Share of weights added to the gradient.", AtLeast0),
    "optimizer.keep": _key(False, "Whether clients keep the optimizer's state between rounds."),
    "start_from": _key(
        "",
        "Workdir of a finished run from whose model clients start, as an unseen client gets it.",
    ),
    "share": _key(
        "",
        "What leaves the client: everything, nothing, all_but_batch_norm, all_but_statistics, "
        "all_but_norms, all_but_head (FedPer), only_head (LG-FedAvg), or your own "
        "package.module:function. Empty: the method's own rule.",
    ),
    "frozen": _key(
        "",
        "What nothing trains or sends: paths of modules, such as layer1,layer2; "
        "all_but:paths=head; at:paths=layer1:statistics=False, whose running statistics move; or a "
        "rule as for share. Empty: nothing.",
    ),
    "weigh": _key(
        "",
        "Weights of the clients in the average: a name of `list weights` with its options, such as "
        "krum:malicious=1, or your own. Empty: the method's own.",
    ),
    "clients": _key(
        "auto",
        "How a round's clients run on a device: one after the other (map), all at once (vmap), n "
        "at a time (vmap:at_once=n), or as suits the device (auto).",
    ),
    "mesh.clients": _key(
        0,
        "Devices over which clients are shared out. 0: all; of a CPU as many as keep its cores at "
        "work, if clients=auto.",
        StepsOr0,
    ),
    "mesh.batch": _key(0, "Devices over which a batch is split. 0: all.", StepsOr0),
    "clients_per_round": _key(0, "Clients drawn to take part in a round. 0: all.", StepsOr0),
    "population": _name(
        "Where the clients' own parts of the state are: with host only those of a round's clients "
        "are on the device. auto is host for some of more than 1000 clients.",
        *("auto", "device", "host"),
    ),
    "participation": _key(
        "uniform",
        "Chances of clients to be drawn: uniform, or by_size of their samples; with options such "
        "as by_size:dropout=0.1:trace=FILE, see `list participation`.",
    ),
    "privacy": _key(
        "",
        "Differential privacy of clients: server:clip=1:noise=1 adds noise to the sum of clipped "
        "updates, client:clip=1:noise=1 to each; see `list privacy`. Empty: none.",
    ),
    "on_nonfinite": _name(
        "What a non-finite update does: it stops the run, or is dropped.", "stop", "drop"
    ),
    "target": _key(
        "",
        "The unseen domain, several (a,b), or a group; `each` trains once for each domain. Empty: "
        "all domains train.",
    ),
    "adaptations": _key(
        ("running",), "How an unseen client predicts: `list adaptations`, with their options."
    ),
    "eval_every": _key(5, "Rounds between evaluations. The last is always evaluated.", Rounds),
    "eval_also": _key(
        ("unseen",),
        "What evaluations measure beside internal clients: unseen clients, which else are tested "
        "once, in the selected round; train_loss, the loss on training samples (FedBN, Fig. 3).",
        _MEASURED,
    ),
    "predictions": _name(
        "Form of answers/*-predictions of the selected round: probabilities or masks' scores "
        "(csv), or all masks (npz). Empty: none.",
        *("", "csv", "npz"),
    ),
    "eval_batch_size": _key(500, "Number of samples that are tested at once.", Samples),
    "eval_clients": _key(0, "Clients that are evaluated, drawn once. 0 for all.", StepsOr0),
    "clients_named": _key(
        100, "Most clients that records name; of more they have quantiles.", Steps
    ),
    "adapt_batch_size": _key(32, "Samples of a batch in the stream that adaptations see.", Samples),
    "checkpoint_every": _key(5, "Rounds between checkpoints. The last is always saved.", Rounds),
    "personalize_samples": _key(
        None,
        "Labelled samples to which a tested client adapts first. Empty: the method's own.",
        SamplesOr0,
    ),
    "compilation_cache": _key(
        "~/.cache/fedjax_bn/compiled", "Folder of compiled programs.", _FOLDER
    ),
    "profile": _key(0, "Round, from 1, traced into WORKDIR/profile. 0: none.", RoundsOr0),
    "seed": _key(0, "Seed of all random numbers of a run.", Seed),
    "data.name": _key("scanners", "The dataset: a name of `list datasets`, for some with options."),
    "data.path": _key("", "File or folder of a dataset that is not embedded."),
    "data.image_size": _key(28, "Side of the square images in pixels.", Pixels),
    "data.orientation": _name(
        "How image files are read: turned by their EXIF, or as stored, as torchvision does.",
        *("upright", "stored"),
    ),
    "data.cache": _key("~/.cache/fedjax_bn", "Folder in which decoded images are kept.", _FOLDER),
    "data.device_megabytes": _key(4000, "MB above which data stream from the host.", RoundsOr0),
    "data.split": _name(
        "How a domain is split: by its published lists (official, which also holds validation out "
        "of digits), or at random. Empty: official where there is one.",
        *("", "official", "holdout", "stratified"),
    ),
    "data.validation": _key(0.1, "Share of a domain's samples that validates.", Share),
    "data.test": _key(0.0, "Share of a domain's samples that tests.", Share),
    "data.truncate": _key(None, "Whether domains are cut to the smallest. Empty: no.", bool),
    "data.fraction": _key(None, "Share of training samples used. Empty: all.", Fraction),
    "data.clients_per_domain": _key(1, "Clients that share out a domain's samples.", Steps),
    "data.num_clients": _key(0, "Clients of all domains, instead of clients_per_domain.", StepsOr0),
    "data.partition": _key(
        "iid",
        "How clients share out a domain's samples: iid; dirichlet:alpha=A:smallest=N with labels "
        "the more unequal the smaller A is; drawn:samples=N, which others may have too; pooled, "
        "where one client has all.",
        PARTITION,
    ),
    "data.sizes": _key("", "Training samples of all clients, or of each, such as 743,7943.", SIZES),
    "data.augment": _key("none", "Augmentation of images: `list augmentations`, or own."),
    "data.perturb": _key(
        "",
        "What training does to standardized images: amplitude_mix:probability=0.5, randconv, or "
        "your own. Empty: nothing.",
    ),
    "data.domains": _key((), "Domains, sites or corruptions that are read. Empty: all."),
    "data.classes": _key(
        (),
        "Classes that are read; of masks their names, the background first. Empty: all (of "
        "domainnet: ten).",
    ),
    "data.large": _name("Large images with masks are stretched or cut.", "resize", "tiles"),
    "data.pairs": _key((), "Patterns of images' and masks' paths. Empty: equal names.", _PATTERNS),
    "data.groups": _key("", "Part of paths, such as the patient, that no split cuts.", _EXPRESSION),
    "data.plane": _name("Plane of the slices of NIfTI volumes.", "axial", "coronal", "sagittal"),
    "data.window": _key(
        (),
        "Intensities of NIfTI volumes that become black and white, such as -160,240. Empty: the "
        "smallest and the 99 % quantile of each.",
        GREYS,
    ),
    "data.severities": _key((), "Severities of cifar10_c, from 1 to 5. Empty: all."),
    "data.protocol": _name("Whose prostate slices and parts. Empty: all, by patient.", *PROTOCOLS),
}


def base() -> ConfigDict:
    """Returns all keys with their defaults; a config file changes what it needs."""
    nested: dict[str, Any] = {}
    for name, key in KEYS.items():
        group, _, key_name = name.rpartition(".")
        place = nested.setdefault(group, {}) if group else nested
        place[key_name] = placeholder(key.kind) if key.default is None else key.default
    return ConfigDict(nested)
