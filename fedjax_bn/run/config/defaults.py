"""All configuration keys: default, range and meaning; each has one meaning everywhere.

`fedjax-bn list keys` prints this table.
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from fedjax_bn.engine.ranges import (
    ABOVE_0,
    ALPHA,
    ANY,
    AT_LEAST_0,
    BY_KIND,
    CLIENTS,
    CLIENTS_OR_0,
    COUNT,
    COUNT_OR_0,
    EPOCHS,
    FOLDER,
    FOLDER_OR_BUCKET,
    FRACTION,
    INSIDE,
    MESH,
    PARTITION,
    PATH,
    PIXELS,
    SAMPLES,
    SAMPLES_OR_0,
    SEED,
    SHARE,
    SIZES,
    STEPS,
    STEPS_OR_0,
    Range,
    one_of,
)
from fedjax_bn.run.config.method_keys import method_arguments

WINDOW = Range("0, or from 2 to 1000000", lambda value: value == 0 or 2 <= value <= 1_000_000)


class Key(NamedTuple):
    """A key of the configuration.

    Attributes:
      default: its value where nothing else is said; None for a key of type `optional`.
      meaning: one line.
      stated: what values of its type are allowed, where that is said of this key alone.
      optional: the type of a key that may be None.
    """

    default: Any
    meaning: str
    stated: Range | None = None
    optional: type | None = None

    @property
    def kind(self) -> type:
        """The type of its values."""
        return self.optional or type(self.default)

    @property
    def range(self) -> Range:
        """What values of its type are allowed."""
        return self.stated or BY_KIND.get(self.kind, ANY)


RUN = {
    "method": Key("fedbn", "`list methods`, or your own package.module:function:key=value"),
    "baselines": Key((), "methods to run beside it, each in WORKDIR/baselines/NAME"),
    "model": Key("DigitCNN", "`list models`, or your own package.module:Class:key=value"),
    "pretrained": Key("", "weights to start from: a file, or a hub id; empty: none", PATH),
    "compute_dtype": Key(
        "float32",
        "in which layers compute: float32, or bfloat16 with variables, statistics of batch norms "
        "and losses in float32 (mixed precision, for GPU and TPU)",
        one_of("float32", "bfloat16"),
    ),
    "rounds": Key(20, "rounds of the federation", COUNT),
    "local_epochs": Key(1, "passes over its own data that a client makes each round", STEPS),
    "client_epochs": Key((), "of each client, numbers in their order; empty: local_epochs", EPOCHS),
    "local_steps": Key(
        0, "if above 0: steps a client makes each round, instead of epochs", STEPS_OR_0
    ),
    "local_selection": Key(
        0,
        "if above 0: steps between validations of a client, which then uploads its best state of "
        "the round (FedIG, A.2)",
        STEPS_OR_0,
    ),
    "validate_with": Key(
        "own",
        "the model whose validation accuracy selects the round: own, each client its own, or "
        "global, all the aggregated one (FedIG, A.2)",
        one_of("own", "global"),
    ),
    "patience": Key(
        0,
        "if above 0: rounds without a better mean validation accuracy after which a run stops "
        "(TsmoBN, E.1)",
        COUNT_OR_0,
    ),
    "batch_size": Key(32, "samples of a step", SAMPLES),
    "optimizer.name": Key("sgd", "the clients' optimizer", one_of("sgd", "adam")),
    "optimizer.learning_rate": Key(0.01, "of the clients' steps", ABOVE_0),
    "optimizer.schedule": Key(
        "constant",
        "of the learning rate over rounds: constant, cosine, step or exponential",
        one_of("constant", "cosine", "step", "exponential"),
    ),
    "optimizer.warmup_rounds": Key(
        0, "first rounds, in which the rate rises by equal steps to learning_rate", COUNT_OR_0
    ),
    "optimizer.decay_rounds": Key(
        0,
        "rounds until a cosine ends (0: with the run), between the drops of step, and for one "
        "decay_factor of exponential",
        COUNT_OR_0,
    ),
    "optimizer.decay_factor": Key(
        0.1, "by what step and exponential multiply the rate every decay_rounds", FRACTION
    ),
    "optimizer.final_fraction": Key(0.0, "of learning_rate, where a cosine ends and stays", SHARE),
    "optimizer.momentum": Key(0.0, "sgd only", SHARE),
    "optimizer.nesterov": Key(False, "sgd with momentum only"),
    "optimizer.weight_decay": Key(0.0, "added to the gradient (L2), as in PyTorch", AT_LEAST_0),
    "optimizer.keep": Key(False, "whether clients keep its state (momentum) between rounds"),
    "start_from": Key(
        "",
        "workdir of a finished run from whose model all clients start: that of its selected round, "
        "as an unseen client receives it; empty: none",
        PATH,
    ),
    "share": Key(
        "",
        "what leaves the client: everything, nothing, all_but_batch_norm, all_but_statistics, or "
        "your own; empty: the method's own rule",
    ),
    "weigh": Key(
        "",
        "by_size, uniform, by_divergence, risk_extrapolation:eta=0.5:solver=slsqp, "
        "generalization_adjustment:metric=loss:step=0.2, or your own; empty: the method's own",
    ),
    "clients": Key("auto", "auto, map, vmap, vmap:n (n clients at a time)"),
    "mesh": Key(
        "auto",
        "devices over which clients are shared out: auto, all; a number, 1 for one alone; "
        "clients:N,batch:M, N over which clients and M over which each batch, as auto does it "
        "where there are more devices than clients",
        MESH,
    ),
    "clients_per_round": Key(0, "clients drawn to take part in a round; 0: all", CLIENTS_OR_0),
    "population": Key(
        "auto",
        "where the clients' own parts of the state lie: device, disk (in the workdir; those drawn "
        "for a round are on the device), or auto: disk for more than 1000, of which some take part",
        one_of("auto", "device", "disk"),
    ),
    "participation.draw": Key(
        "uniform",
        "how clients_per_round are drawn: uniform, or by_size, with chances by their samples",
        one_of("uniform", "by_size"),
    ),
    "participation.trace": Key(
        "", "file that says who is available in which round; empty: all are", PATH
    ),
    "participation.dropout": Key(
        0.0, "chance of a client to drop out of a round for which it was drawn", SHARE
    ),
    "privacy.clip": Key(
        0.0,
        "if above 0: norm to which each client's update is clipped; with noise, differential "
        "privacy of clients, see docs/privacy.md",
        AT_LEAST_0,
    ),
    "privacy.noise": Key(
        0.0, "standard deviation of the noise on shared leaves, in units of the clip", AT_LEAST_0
    ),
    "privacy.at": Key(
        "server",
        "who adds it: server, once to the sum, or client, each to its own update",
        one_of("server", "client"),
    ),
    "privacy.seed": Key(
        None,
        "of the noise; empty: seed, and over Flower numbers that nobody knows",
        SEED,
        optional=int,
    ),
    "privacy.delta": Key(
        1e-5, "delta of (epsilon, delta); well below one over the number of clients", INSIDE
    ),
    "on_nonfinite": Key(
        "stop",
        "what follows an update of a client, or a step of the server, that is not finite: the run "
        "stops, or it is left out; where all clients fail it stops",
        one_of("stop", "drop"),
    ),
    "target": Key(
        "", "the unseen domain, several (a,b) or a group of them; each: all in turn; empty: none"
    ),
    "adaptations": Key(
        ("running",), "how an unseen client predicts: `list adaptations`, name:key=value:key=value"
    ),
    "eval_every": Key(5, "rounds between evaluations; the last round is always evaluated", COUNT),
    "eval_unseen": Key(
        "always",
        "when unseen clients are tested: always, in every evaluation, or once, in the selected "
        "round when the run has ended",
        one_of("always", "once"),
    ),
    "eval_train_loss": Key(
        False,
        "whether evaluations take the clients' loss on their training samples too, after "
        "aggregation and without training (FedBN, Fig. 3)",
    ),
    "predictions": Key(
        "",
        "form in which a classifier's run writes the probabilities of every test sample in its "
        "selected round, answers/*-predictions: csv, npz; empty: none",
        one_of("", "csv", "npz"),
    ),
    "eval_batch_size": Key(500, "samples tested at once", SAMPLES),
    "eval_clients": Key(
        0,
        "if above 0: clients that are evaluated, always the same ones, drawn from the seed; 0: all",
        CLIENTS_OR_0,
    ),
    "clients_named": Key(
        100,
        "records, tables and plots name clients one by one up to so many; of more they show "
        "quantiles, and means by domain",
        CLIENTS,
    ),
    "adapt_batch_size": Key(32, "of the stream that adaptations see", SAMPLES),
    "checkpoint_every": Key(5, "rounds between checkpoints; the last one is always kept", COUNT),
    "personalize.samples": Key(
        None,
        "labelled samples on which a tested client adapts first; empty: the method's own, mostly 0",
        SAMPLES_OR_0,
        int,
    ),
    "personalize.steps": Key(1, "gradient steps on them", STEPS),
    "personalize.rate": Key(
        None, "their learning rate; empty: the method's own, else 0.01", AT_LEAST_0, float
    ),
    "compilation_cache": Key(
        "~/.cache/fedjax_bn/compiled",
        "folder for compiled programs; empty: none is kept",
        FOLDER_OR_BUCKET,
    ),
    "wandb": Key("", "project of Weights & Biases that rounds are reported to; empty: none"),
    "seed": Key(0, "of all random numbers", SEED),
}

DATA = {
    "data.name": Key("scanners", "`list datasets`"),
    "data.path": Key("", "file or folder of a dataset that is not embedded", PATH),
    "data.image_size": Key(28, "side of the square images, pixels", PIXELS),
    "data.max_megapixels": Key(
        100.0, "millions of pixels that an image file may have; a larger one is refused", ABOVE_0
    ),
    "data.orientation": Key(
        "upright",
        "how image files are read: upright, turned by their EXIF as viewers show them, or stored, "
        "unturned as torchvision reads them; boxes refer to the image as it is read",
        one_of("upright", "stored"),
    ),
    "data.cache": Key(
        "~/.cache/fedjax_bn", "folder for decoded images; empty: none is kept", FOLDER
    ),
    "data.device_megabytes": Key(
        4000, "larger training or test sets are streamed from the host", COUNT_OR_0
    ),
    "data.split": Key(
        "",
        "how a domain is split; empty: official where there is one; official holds data.validation "
        "out of digits' training samples, which empty does not",
        one_of("", "official", "holdout", "stratified"),
    ),
    "data.validation": Key(
        0.1, "share of a domain's samples; see fedjax_bn.data.division.split", SHARE
    ),
    "data.test": Key(0.0, "share of a domain's samples", SHARE),
    "data.truncate": Key(None, "to the smallest domain; empty: the source's own", optional=bool),
    "data.fraction": Key(None, "of the training data; empty: the source's own", FRACTION, float),
    "data.clients_per_domain": Key(1, "clients that share a domain's samples", CLIENTS),
    "data.num_clients": Key(
        0, "of all domains together, instead of clients_per_domain; 0: not", CLIENTS_OR_0
    ),
    "data.partition": Key(
        "iid",
        "labels of a domain's clients; dirichlet:smallest=N: none has fewer than N samples, 10 "
        "unless it is given, where there are enough; drawn:N: each draws N of its domain's, which "
        "others may have too; pooled: one client owns all",
        PARTITION,
    ),
    "data.alpha": Key(0.5, "of dirichlet; the smaller, the more unequal", ALPHA),
    "data.sizes": Key(
        "",
        "of the clients: one number or one each, such as 743,7943; or drawn, perhaps with "
        ":smallest=N as in data.partition",
        SIZES,
    ),
    "data.augment": Key(
        "none",
        "of the training images: none, domainbed, office, randaug:ops=2:magnitude=9, "
        "boxes:flip=0.5:scale=0.5, or your own function (size, *, ...) -> augment",
    ),
    "data.perturb": Key(
        "",
        "what training does to images once they are standardized: amplitude_mix:probability=0.5, "
        "randconv:mix=True:largest=7, or your own; empty: nothing",
    ),
    "data.domains": Key(
        (), "boxes, folders, npz, tfds_*: which; empty: all; bdd100k: see its file"
    ),
    "data.classes": Key(
        (), "boxes, domainnet, folders, tfds_*: which; empty: all, of domainnet ten"
    ),
    "data.max_boxes": Key(100, "boxes of an image; one with more keeps its largest", COUNT),
    "data.corruptions": Key((), "cifar10_c: which; empty: all 19"),
    "data.severities": Key((), "cifar10_c: of 1 to 5; empty: all"),
    "detection.score": Key("mAP50", "what detectors report", one_of("mAP50", "mAP50-95")),
    "detection.box": Key(0.05, "gain of the boxes in a detector's loss", AT_LEAST_0),
    "detection.objectness": Key(1.0, "gain of objectness in it", AT_LEAST_0),
    "detection.classes": Key(0.5, "gain of the classes in it", AT_LEAST_0),
    # See load in fedjax_bn/data/sets/abide.py
    "abide.window": Key(32, "time points of a connectome; 0: all", WINDOW),
    "abide.stride": Key(1, "time points between windows", STEPS),
    "abide.windows_per_subject": Key(0, "how many at most; 0: all", STEPS_OR_0),
    "abide.fisher_z": Key(False, "whether correlations r become artanh r"),
    "abide.sites": Key((), "which; empty: all"),
    "abide.atlas": Key("", "such as cc200, where the folder has several"),
}

# Defaults, meanings and ranges of methods' own arguments are read from the methods.
METHOD_KEYS = {key: Key(*argument) for key, argument in method_arguments().items()}
KEYS: dict[str, Key] = RUN | DATA | METHOD_KEYS


def base() -> ConfigDict:
    """All keys with their defaults; a config file changes what it needs."""
    nested: dict[str, Any] = {}
    for name, key in KEYS.items():
        group, _, last = name.rpartition(".")
        place = nested.setdefault(group, {}) if group else nested
        place[last] = placeholder(key.optional) if key.optional else key.default
    return ConfigDict(nested)
