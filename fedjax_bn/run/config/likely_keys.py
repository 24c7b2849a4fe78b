"""Keys that a user probably meant by a name that is none."""

import difflib

from fedjax_bn.run.config.defaults import KEYS

_MOST = 3
# What other programs and papers call a key, or its last part: without capitals and underscores.
_SYNONYMS = {
    "optimizer.learning_rate": "lr stepsize clientlr locallr baselr initlr",
    "optimizer.weight_decay": "wd decay l2 weightdecay",
    "optimizer.momentum": "mom",
    "optimizer.name": "opt optim optimiser solver adam",
    "optimizer.schedule": "scheduler lrscheduler lrschedule learningrateschedule lrdecay cosine",
    "optimizer.warmup_rounds": "warmup warmupepochs warmupsteps",
    "optimizer.decay_rounds": "tmax decaysteps milestones lrstep",
    "optimizer.decay_factor": "gamma lrgamma lrdecay",
    "optimizer.final_fraction": "minlr etamin lrmin alphamin",
    "rounds": "nrounds numrounds commrounds communicationrounds commround "
    "globalrounds globalepochs maxrounds iterations steps",
    "local_epochs": "e epoch epochs nepochs numepochs localep localepoch le innerepochs maxepochs",
    "local_steps": "steps localiterations inneriterations",
    "batch_size": "bs batch batchsize localbs localbatchsize minibatch trainbatchsize",
    "eval_batch_size": "testbs testbatchsize evalbs",
    "data.num_clients": "k nclients numclients numusers nusers users nodes sites",
    "clients_per_round": "c frac participation participationrate samplerate clientfraction "
    "numclients cohort",
    "participation.dropout": "dropout stragglers",
    "method": "algorithm algo strategy aggregator fl",
    "weigh": "weights weighting aggregation",
    "model": "arch architecture net network backbone",
    "pretrained": "checkpoint init weights",
    "start_from": "resume resumefrom initfrom load loadmodel finetune checkpoint",
    "data.name": "dataset data task",
    "data.path": "root dataroot datadir datapath dir folder",
    "data.image_size": "imgsize imsize resolution size inputsize",
    "data.validation": "val valsplit valfraction",
    "data.orientation": "exif rotation",
    "data.augment": "aug augmentation transform transforms",
    "data.partition": "noniid dirichlet heterogeneity",
    "data.alpha": "dirichlet dirichletalpha concentration",
    "target": "unseen leaveout testdomain heldout targetdomain",
    "eval_every": "evalfreq evalinterval testevery testinterval valinterval",
    "checkpoint_every": "saveevery savefreq saveinterval",
    "patience": "earlystopping earlystop",
    "seed": "randomseed rng manualseed",
    "compute_dtype": "dtype precision amp fp16 bf16 mixedprecision",
    "mesh": "device devices gpu gpus cuda ngpus numgpus",
    "privacy.noise": "dp epsilon sigma noisemultiplier",
    "privacy.clip": "clipping maxgradnorm clipnorm maxnorm gradclip",
    "privacy.delta": "delta",
    "eta": "serverlr",
    "mu": "proximal prox",
}


def likely_keys(name: str) -> list[str]:
    """Returns the keys that a name probably means, the likeliest first, at most three.

    A name may be the last part of a key (`mu`), another word for it (`optimizer.lr`), a slip of
    the pen (`data.nmae`), or share words with it (`num_local_epochs`).
    """
    last = _plain(name.rpartition(".")[2])
    same = [key for key in KEYS if _plain(key.rpartition(".")[2]) == last]
    same.sort(key=lambda key: key.count("."))
    meant = [key for key, words in _SYNONYMS.items() if last in words.split()]
    named = [key for one in meant for key in KEYS if key == one or key.endswith(f".{one}")]
    close = difflib.get_close_matches(name.lower()[:100], KEYS, _MOST, 0.75)
    words = set(name.lower().replace(".", "_").split("_"))
    shared = {key: len(words & set(key.replace(".", "_").split("_"))) for key in KEYS}
    sharing = sorted(filter(shared.get, KEYS), key=lambda key: (-shared[key], len(key)))
    likely = [*named, *same] or close or sharing
    likely = likely or difflib.get_close_matches(name.lower()[:100], KEYS, _MOST, 0.65)
    return list(dict.fromkeys(likely))[:_MOST]


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")
