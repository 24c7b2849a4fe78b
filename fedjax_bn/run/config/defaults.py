"""All keys of the configuration: type, default, range and meaning; each has one meaning everywhere.

The keys of methods, such as `fedprox.mu`, come from the methods' signatures and docstrings, and
`fedjax-bn list keys` prints all.
"""

import inspect
import os
import re
from functools import cache
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from fedjax_bn.arguments.choices import REQUIRED, Argument, plain_arguments
from fedjax_bn.arguments.ranges import (
    ABOVE_0,
    ALPHA,
    ANY,
    AT_LEAST_0,
    BY_KIND,
    CLIENTS,
    CLIENTS_OR_0,
    COUNT,
    COUNT_OR_0,
    FRACTION,
    INSIDE,
    OF_TEXT,
    PIXELS,
    SAMPLES,
    SAMPLES_OR_0,
    SEED,
    SHARE,
    STEPS,
    STEPS_OR_0,
    Range,
    one_of,
    printable,
)
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.division.forms import PARTITION, SIZES

_MESH = re.compile(r"([1-9]\d{0,5})|clients:([1-9]\d{0,5})(?:,batch:([1-9]\d{0,5}))?", re.ASCII)
_BUCKET = re.compile(r"[a-z][a-z0-9]*://.", re.ASCII)


def mesh_sizes(text: str) -> tuple[int, int | None]:
    """Returns N and M of "clients:N,batch:M", N and 1 of "clients:N", N and None of a number alone.

    Raises:
      ValueError: it is none of these.
    """
    found = _MESH.fullmatch(text)
    if found is None:
        raise ValueError(f"{brief(text)} must be {MESH.text}")
    devices, clients, batch = found.groups()
    return (int(devices), None) if devices else (int(clients), int(batch or 1))


def _is_path(text: str) -> bool:
    unknown_home = text.startswith("~") and os.path.expanduser(text) == text
    return printable(text) and not unknown_home


def _is_folder(text: str) -> bool:
    """Whether a text is a path that says where it begins: a slip such as None makes no folder."""
    begins = text.startswith(("./", "../", "~")) or os.path.isabs(text)
    return not text or (begins and _is_path(text))


def _are_epochs(texts: tuple[str, ...]) -> bool:
    digits = (text.isascii() and text.isdecimal() and len(text) < 6 for text in texts)
    return len(texts) <= 4096 and all(digits) and all(int(text) > 0 for text in texts)


MESH = Range(
    "auto, a number of devices, clients:N or clients:N,batch:M",
    lambda text: text == "auto" or bool(_MESH.fullmatch(text)),
)
EPOCHS = Range("whole numbers above 0 and below 100000", _are_epochs)
PATH = Range(f"a path ({OF_TEXT}) whose ~NAME, if any, is a user here", _is_path)
FOLDER = Range(
    "empty for none, or a folder that begins with /, ./, ../ or ~ (of ~NAME a user here)",
    _is_folder,
)
FOLDER_OR_BUCKET = Range(
    f"{FOLDER.text}, or a bucket such as gs://NAME",
    lambda text: _is_folder(text) or (bool(_BUCKET.match(text)) and printable(text)),
)
WINDOW = Range("0, or from 2 to 1000000", lambda value: value == 0 or 2 <= value <= 1_000_000)


def _key(
    default: Any, meaning: str, allowed: Range | None = None, kind: type | None = None
) -> Argument:
    kind = kind or type(default)
    return Argument(kind, default, allowed or BY_KIND.get(kind, ANY), meaning)


RUN = {
    "method": _key("", "`list methods`, or your own package.module:function:key=value"),
    "baselines": _key((), "methods to run beside it, each in WORKDIR/baselines/NAME"),
    "model": _key("DigitCNN", "`list models`, or your own package.module:Class:key=value"),
    "pretrained": _key("", "weights to start from: a file, or a hub id; empty: none", PATH),
    "compute_dtype": _key(
        "float32",
        "in which layers compute: float32, or bfloat16 with variables, statistics of batch norms "
        "and losses in float32 (mixed precision, for GPU and TPU)",
        one_of("float32", "bfloat16"),
    ),
    "rounds": _key(20, "rounds of the federation", COUNT),
    "local_epochs": _key(1, "passes over its own data that a client makes each round", STEPS),
    "client_epochs": _key(
        (), "of each client, numbers in their order; empty: local_epochs", EPOCHS
    ),
    "local_steps": _key(
        0, "if above 0: steps a client makes each round, instead of epochs", STEPS_OR_0
    ),
    "local_selection": _key(
        0,
        "if above 0: steps between validations of a client, which then uploads its best state of "
        "the round (FedIG, A.2)",
        STEPS_OR_0,
    ),
    "validate_with": _key(
        "own",
        "the model whose validation accuracy selects the round: own, each client its own, or "
        "global, all the aggregated one (FedIG, A.2)",
        one_of("own", "global"),
    ),
    "patience": _key(
        0,
        "if above 0: rounds without a better mean validation accuracy after which a run stops "
        "(TsmoBN, E.1)",
        COUNT_OR_0,
    ),
    "batch_size": _key(32, "samples of a step", SAMPLES),
    "optimizer.name": _key("sgd", "the clients' optimizer", one_of("sgd", "adam")),
    "optimizer.learning_rate": _key(0.01, "of the clients' steps", ABOVE_0),
    "optimizer.schedule": _key(
        "constant",
        "of the learning rate over rounds: constant, cosine, step or exponential",
        one_of("constant", "cosine", "step", "exponential"),
    ),
    "optimizer.warmup_rounds": _key(
        0, "first rounds, in which the rate rises by equal steps to learning_rate", COUNT_OR_0
    ),
    "optimizer.decay_rounds": _key(
        0,
        "rounds until a cosine ends (0: with the run), between the drops of step, and for one "
        "decay_factor of exponential",
        COUNT_OR_0,
    ),
    "optimizer.decay_factor": _key(
        0.1, "by what step and exponential multiply the rate every decay_rounds", FRACTION
    ),
    "optimizer.final_fraction": _key(0.0, "of learning_rate, where a cosine ends and stays", SHARE),
    "optimizer.momentum": _key(0.0, "sgd only", SHARE),
    "optimizer.nesterov": _key(False, "sgd with momentum only"),
    "optimizer.weight_decay": _key(0.0, "added to the gradient (L2), as in PyTorch", AT_LEAST_0),
    "optimizer.keep": _key(False, "whether clients keep its state (momentum) between rounds"),
    "start_from": _key(
        "",
        "workdir of a finished run from whose model all clients start: that of its selected round, "
        "as an unseen client receives it; empty: none",
        PATH,
    ),
    "share": _key(
        "",
        "what leaves the client: everything, nothing, all_but_batch_norm, all_but_statistics, or "
        "your own; empty: the method's own rule",
    ),
    "weigh": _key(
        "",
        "by_size, uniform, by_divergence, risk_extrapolation:eta=0.5:solver=slsqp, "
        "generalization_adjustment:metric=loss:step=0.2, or your own; empty: the method's own",
    ),
    "clients": _key("auto", "auto, map, vmap, vmap:n (n clients at a time)"),
    "mesh": _key(
        "auto",
        "devices over which clients are shared out: auto, all; a number, 1 for one alone; "
        "clients:N,batch:M, N over which clients and M over which each batch, as auto does it "
        "where there are more devices than clients",
        MESH,
    ),
    "clients_per_round": _key(0, "clients drawn to take part in a round; 0: all", CLIENTS_OR_0),
    "population": _key(
        "auto",
        "where the clients' own parts of the state lie: device, disk (in the workdir; those drawn "
        "for a round are on the device), or auto: disk for more than 1000, of which some take part",
        one_of("auto", "device", "disk"),
    ),
    "participation.draw": _key(
        "uniform",
        "how clients_per_round are drawn: uniform, or by_size, with chances by their samples",
        one_of("uniform", "by_size"),
    ),
    "participation.trace": _key(
        "", "file that says who is available in which round; empty: all are", PATH
    ),
    "participation.dropout": _key(
        0.0, "chance of a client to drop out of a round for which it was drawn", SHARE
    ),
    "privacy.clip": _key(
        0.0,
        "if above 0: norm to which each client's update is clipped; with noise, differential "
        "privacy of clients, see docs/privacy.md",
        AT_LEAST_0,
    ),
    "privacy.noise": _key(
        0.0, "standard deviation of the noise on shared leaves, in units of the clip", AT_LEAST_0
    ),
    "privacy.at": _key(
        "server",
        "who adds it: server, once to the sum, or client, each to its own update",
        one_of("server", "client"),
    ),
    "privacy.seed": _key(
        None,
        "of the noise; empty: seed, and over Flower numbers that nobody knows",
        SEED,
        kind=int,
    ),
    "privacy.delta": _key(
        1e-5, "delta of (epsilon, delta); well below one over the number of clients", INSIDE
    ),
    "on_nonfinite": _key(
        "stop",
        "what follows an update of a client, or a step of the server, that is not finite: the run "
        "stops, or it is left out; where all clients fail it stops",
        one_of("stop", "drop"),
    ),
    "target": _key(
        "", "the unseen domain, several (a,b) or a group of them; each: all in turn; empty: none"
    ),
    "adaptations": _key(
        ("running",), "how an unseen client predicts: `list adaptations`, name:key=value:key=value"
    ),
    "eval_every": _key(5, "rounds between evaluations; the last round is always evaluated", COUNT),
    "eval_unseen": _key(
        "always",
        "when unseen clients are tested: always, in every evaluation, or once, in the selected "
        "round when the run has ended",
        one_of("always", "once"),
    ),
    "eval_train_loss": _key(
        False,
        "whether evaluations take the clients' loss on their training samples too, after "
        "aggregation and without training (FedBN, Fig. 3)",
    ),
    "predictions": _key(
        "",
        "form in which a classifier's run writes the probabilities of every test sample in its "
        "selected round, answers/*-predictions: csv, npz; empty: none",
        one_of("", "csv", "npz"),
    ),
    "eval_batch_size": _key(500, "samples tested at once", SAMPLES),
    "eval_clients": _key(
        0,
        "if above 0: clients that are evaluated, always the same ones, drawn from the seed; 0: all",
        CLIENTS_OR_0,
    ),
    "clients_named": _key(
        100,
        "records, tables and plots name clients one by one up to so many; of more they show "
        "quantiles, and means by domain",
        CLIENTS,
    ),
    "adapt_batch_size": _key(32, "of the stream that adaptations see", SAMPLES),
    "checkpoint_every": _key(5, "rounds between checkpoints; the last one is always kept", COUNT),
    "personalize.samples": _key(
        None,
        "labelled samples on which a tested client adapts first; empty: the method's own, mostly 0",
        SAMPLES_OR_0,
        int,
    ),
    "personalize.steps": _key(1, "gradient steps on them", STEPS),
    "personalize.rate": _key(
        None, "their learning rate; empty: the method's own, else 0.01", AT_LEAST_0, float
    ),
    "compilation_cache": _key(
        "~/.cache/fedjax_bn/compiled",
        "folder for compiled programs; empty: none is kept",
        FOLDER_OR_BUCKET,
    ),
    "wandb": _key("", "project of Weights & Biases that rounds are reported to; empty: none"),
    "seed": _key(0, "of all random numbers", SEED),
}

DATA = {
    "data.name": _key("scanners", "`list datasets`"),
    "data.path": _key("", "file or folder of a dataset that is not embedded", PATH),
    "data.image_size": _key(28, "side of the square images, pixels", PIXELS),
    "data.max_megapixels": _key(
        100.0, "millions of pixels that an image file may have; a larger one is refused", ABOVE_0
    ),
    "data.orientation": _key(
        "upright",
        "how image files are read: upright, turned by their EXIF as viewers show them, or stored, "
        "unturned as torchvision reads them; boxes refer to the image as it is read",
        one_of("upright", "stored"),
    ),
    "data.cache": _key(
        "~/.cache/fedjax_bn", "folder for decoded images; empty: none is kept", FOLDER
    ),
    "data.device_megabytes": _key(
        4000, "larger training or test sets are streamed from the host", COUNT_OR_0
    ),
    "data.split": _key(
        "",
        "how a domain is split; empty: official where there is one; official holds data.validation "
        "out of digits' training samples, which empty does not",
        one_of("", "official", "holdout", "stratified"),
    ),
    "data.validation": _key(
        0.1, "share of a domain's samples; see fedjax_bn.data.division.clients", SHARE
    ),
    "data.test": _key(0.0, "share of a domain's samples", SHARE),
    "data.truncate": _key(None, "to the smallest domain; empty: the source's own", kind=bool),
    "data.fraction": _key(None, "of the training data; empty: the source's own", FRACTION, float),
    "data.clients_per_domain": _key(1, "clients that share a domain's samples", CLIENTS),
    "data.num_clients": _key(
        0, "of all domains together, instead of clients_per_domain; 0: not", CLIENTS_OR_0
    ),
    "data.partition": _key(
        "iid",
        "labels of a domain's clients; dirichlet:smallest=N: none has fewer than N samples, 10 "
        "unless it is given, where there are enough; drawn:N: each draws N of its domain's, which "
        "others may have too; pooled: one client owns all",
        PARTITION,
    ),
    "data.alpha": _key(0.5, "of dirichlet; the smaller, the more unequal", ALPHA),
    "data.sizes": _key(
        "",
        "of the clients: one number or one each, such as 743,7943; or drawn, perhaps with "
        ":smallest=N as in data.partition",
        SIZES,
    ),
    "data.augment": _key(
        "none",
        "of the training images: none, domainbed, office, randaug:ops=2:magnitude=9, "
        "boxes:flip=0.5:scale=0.5, or your own function (size, *, ...) -> augment",
    ),
    "data.perturb": _key(
        "",
        "what training does to images once they are standardized: amplitude_mix:probability=0.5, "
        "another of fedjax_bn.engine.perturb, or your own; empty: nothing",
    ),
    "data.domains": _key(
        (), "boxes, folders, npz, tfds_*: which; empty: all; bdd100k: see its file"
    ),
    "data.classes": _key(
        (), "boxes, domainnet, folders, tfds_*: which; empty: all, of domainnet ten"
    ),
    "data.max_boxes": _key(100, "boxes of an image; one with more keeps its largest", COUNT),
    "data.corruptions": _key((), "cifar10_c: which; empty: all 19"),
    "data.severities": _key((), "cifar10_c: of 1 to 5; empty: all"),
    "detection.score": _key("mAP50", "what detectors report", one_of("mAP50", "mAP50-95")),
    "detection.box": _key(0.05, "gain of the boxes in a detector's loss", AT_LEAST_0),
    "detection.objectness": _key(1.0, "gain of objectness in it", AT_LEAST_0),
    "detection.classes": _key(0.5, "gain of the classes in it", AT_LEAST_0),
    # See load in fedjax_bn/data/sets/abide.py
    "abide.window": _key(32, "time points of a connectome; 0: all", WINDOW),
    "abide.stride": _key(1, "time points between windows", STEPS),
    "abide.windows_per_subject": _key(0, "how many at most; 0: all", STEPS_OR_0),
    "abide.fisher_z": _key(False, "whether correlations r become artanh r"),
    "abide.sites": _key((), "which; empty: all"),
    "abide.atlas": _key("", "such as cc200, where the folder has several"),
}

# Arguments that the configuration sets by other keys, or that another method stands for.
_ELSEWHERE = ("clients", "keep_optimizer", "local_epochs", "adapter")


@cache
def keys() -> dict[str, Argument]:
    """Returns all keys, dotted name -> its type, default, range and meaning.

    A method's keys are the keyword arguments whose default is a bool, a number or a text.
    """
    from fedjax_bn import methods  # imports JAX, for which mistakes in flags need not wait

    found = {}
    for name in methods.__all__:
        method = getattr(methods, name)
        meanings = _meanings(inspect.getdoc(method) or "")
        for key, argument in plain_arguments(method, _ELSEWHERE).items():
            if argument.default not in (None, REQUIRED):
                found[f"{name}.{key}"] = argument._replace(meaning=meanings.get(key, ""))
    usual = RUN["method"]._replace(default=methods.USUAL)
    return RUN | {"method": usual} | DATA | dict(sorted(found.items()))


def _meanings(docstring: str) -> dict[str, str]:
    """The text on each argument in the section `Args:` of a docstring, on one line."""
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
