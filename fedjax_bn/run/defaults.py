"""All configuration keys with their defaults; each has one meaning everywhere."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def base() -> ConfigDict:
    """All keys with their defaults; a config file changes what it needs."""
    return ConfigDict(
        {
            "method": "fedbn",  # a name in fedjax_bn.methods
            "baselines": (),  # methods to run beside it, each in WORKDIR/baselines/NAME
            "model": "DigitCNN",  # a name in fedjax_bn.models
            "pretrained": "",  # weights to start from: a file, or a hub id; empty: none
            "rounds": 20,
            "local_epochs": 1,  # passes over its own data that a client makes each round
            "client_epochs": (),  # of each client, numbers in their order; empty: local_epochs
            "local_steps": 0,  # if above 0: steps a client makes each round, instead of epochs
            "local_selection": 0,  # if above 0: steps between validations of a client, which then
            # uploads its best state of the round (FedIG, A.2)
            "batch_size": 32,
            "optimizer": {
                "name": "sgd",  # sgd, adam
                "learning_rate": 0.01,
                "momentum": 0.0,  # sgd only
                "nesterov": False,  # sgd with momentum only
                "weight_decay": 0.0,  # added to the gradient (L2), as in PyTorch
                "keep": False,  # whether clients keep its state (momentum) between rounds
            },
            "share": "",  # a name in fedjax_bn.sharing; empty: the method's own rule
            # by_size, uniform, risk_extrapolation:eta=0.5:solver=slsqp; empty: the method's own
            "weigh": "",
            "clients": "auto",  # auto, map, vmap, vmap:n (n clients at a time)
            "clients_per_round": 0,  # clients drawn to take part in a round; 0: all
            "on_nonfinite": "stop",  # stop, drop: what follows an update that is not finite
            "target": "",  # the unseen domain, several (a,b) or a group of them; empty: none
            "adaptations": ("running",),  # how an unseen client predicts, name:key=value:...
            "eval_every": 5,  # rounds between evaluations; the last round is always evaluated
            "eval_batch_size": 500,
            "adapt_batch_size": 32,  # of the stream that adaptations see
            "checkpoint_every": 5,  # rounds between checkpoints; the last one is always kept
            "personalize": {  # testing after steps on a few labelled samples of the tested client
                "samples": placeholder(int),  # how many; empty: 16 for perfedavg, 0 (none) else
                "steps": 1,
                "rate": placeholder(float),  # learning rate; empty: perfedavg.inner_rate
            },
            "seed": 0,
            "data": data_keys(),
            **method_keys(),
            "abide": {  # see fedjax_bn.data.sets.abide.load
                "window": 32,  # time points of a connectome; 0: all
                "stride": 1,
                "windows_per_subject": 0,  # 0: all
                "fisher_z": False,
                "sites": (),  # empty: all
                "atlas": "",  # such as cc200, where the folder has several
            },
        }
    )


def data_keys() -> ConfigDict:
    """The keys under `data`: what is read, how it is split and shared out."""
    return ConfigDict(
        {
            "name": "scanners",  # a name in fedjax_bn.run.datasets
            "path": "",  # file or folder of a dataset that is not embedded
            "image_size": 28,  # side of the square images, pixels
            "cache": "~/.cache/fedjax_bn",  # folder for decoded images; empty: none is kept
            "device_megabytes": 4000,  # larger training or test sets are streamed from the host
            "split": "",  # official, holdout, stratified; empty: official where there is one
            "validation": 0.1,  # share of a domain's samples; see fedjax_bn.data.division.split
            "test": 0.0,
            "truncate": placeholder(bool),  # to the smallest domain; empty: the source's own
            "fraction": placeholder(float),  # of the training data; empty: the source's own
            "clients_per_domain": 1,
            "num_clients": 0,  # of all domains together, instead of clients_per_domain
            "partition": "iid",  # iid, dirichlet: labels of a domain's clients; pooled: one client
            "alpha": 0.5,  # of dirichlet; the smaller, the more unequal
            "sizes": "",  # of the clients: numbers, lognormal:SIGMA, dirichlet:ALPHA
            "augment": "none",  # none, domainbed, office
            "classes": (),  # domainnet: which; empty: the ten most frequent
            "corruptions": (),  # cifar10_c: which; empty: all 19
            "severities": (),  # cifar10_c: of 1 to 5; empty: all
        }
    )


def method_keys() -> ConfigDict:
    """The methods' own arguments, under their names; defaults from the papers."""
    return ConfigDict(
        {
            "fedadagrad": {"eta": 0.01, "beta1": 0.0, "tau": 1e-3},
            "fedadam": {"eta": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
            "fedavgm": {"eta": 1.0, "beta": 0.9},
            "fedcd": {"lambda_sci": 0.7, "eta": 0.5},
            "feddc": {"alpha": 0.1, "correction": True},
            "fedig": {  # and fediga; FedIG, Tables 1 to 3 and 6
                "lambda_1": 0.1,  # of CACL
                "lambda_2": 4.0,  # of CAFL
                # CAFL over features: sum, as the paper prints it, or mean; empty: sum with
                # `pretrained` weights, mean without, where the sum diverges or collapses
                "cafl": "",
                "mixing": "uniform",  # uniform:low=0:high=1, constant:u=0.5, mixstyle
                "gates": False,  # BIN's learned alpha in the local pass
            },
            "fedprox": {"mu": 0.01},  # strength of the proximal term
            "fedyogi": {"eta": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
            "moon": {"mu": 1.0, "temperature": 0.5},
            "perfedavg": {"inner_rate": 0.01, "second_order": False},
        }
    )
