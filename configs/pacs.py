"""PACS, leaving one domain out (FedIG: Table 5, Section 4.1 and A.2; FedCD: Table 1).

    python -m fedjax_bn.main --config configs/pacs.py --config.data.path=PATH

PATH is laid out as in fedjax_bn/data/sets/image_folders.py; the decoded images take 1.5 GB in the
folder config.data.cache. The target, one of photo, art_painting, cartoon and sketch, is the unseen
client; the others train a ResNet-18. FedIG's starts from ImageNet's weights: the paper's run has
--config.pretrained=timm/resnet18.tv_in1k, fetched once, or a file of these weights. Without this
key the run starts at random. CAFL is a mean over features. The sum that the paper prints
(fediga:cafl=sum) diverged or made all features equal in all our runs, from random weights
and from ImageNet's (docs/results/). A run states its CAFL at its start and in its report.

A fifth of a domain that trains validates, as DomainBed holds out, whose splits the paper follows. A
client uploads its best state of a round by its own validation samples; the round is the one whose
aggregated model is best on all clients' (A.2), served by its running statistics: so FedIG and
FedIG-A are one round of one run.

FedIG's Table 5 (40 rounds of 200 steps, 4 runs), accuracy on the unseen client in percent:

              photo  art_painting  cartoon  sketch
    FedAvg    90.40  72.52         72.59    73.90
    FedProx   90.49  72.41         73.09    72.93
    FedBN     92.74  77.08         75.08    78.28
    FedIG     92.99  82.17         77.71    83.40
    FedIG-A   94.24  84.30         79.80    83.79

    all four targets in turn          --config.target=each
    the other methods beside it       --config.baselines=fedavg,fedprox:mu=0.1,fedbn
    MixIG (Table 1)                   --config.method=fediga:mixing=constant:u=0    (u=1, u=0.5)
    its range (Table 6)               --config.method=fediga:mixing=uniform:low=0:high=0.5
    each loss alone (Table 2)         --config.method=fediga:lambda_1=0    (lambda_2=0)
    FedProx in FedBN (Table 3a)       --config.method=fedprox:mu=0.1
                                      --config.share=all_but_batch_norm
    MixStyle in its place (Table 3b)  --config.method=fediga:mixing=mixstyle
    other inference (Table 3c)        --config.adaptations=running,zero_shot_adapter,ensemble,iabn,
                                      mixnorm,random_alpha,fixed_alpha
    BIN (Table 3c)                    --config.method=fedig:gates=True
                                      --config.adaptations=learned_alpha
    30 clients (A.6)                  configs/pacs_30_clients.py
    centralized (Eq. 1)               --config.method=fedavgm:eta=3:beta=0.5
                                      --config.share=all_but_batch_norm --config.weigh=uniform
                                      --config.local_steps=1 --config.local_selection=0
                                      --config.rounds=8000 --config.eval_every=200
                                      --config.checkpoint_every=200 --config.adaptations=running

Eq. 1 is one model with a batch norm for each domain, trained on the sum of the domains' losses. A
round of one step is a step of SGD on it, because eta=3, the number of clients, turns their mean
into the sum; beta is its momentum, which the batch norms themselves lack.

The method is FedIG-A; with the adaptation `running` instead of its adapter it is FedIG. A finished
run's alphas (Fig. 4a and 7), t-SNE (Fig. 4b) and personalized accuracies (Table 12):

    python -m fedjax_bn.main evaluate --workdir DIR --alphas --tsne --internal

The last are measured on the validation samples that chose the round, because DomainBed's split has
no others; --config.data.test=0.1 in training keeps some for the test.

FedCD's Table 1 (40 rounds of 5 epochs, batches of 16, learning rate 0.001):

              photo  art_painting  cartoon  sketch
    FedAvg    92.77  77.29         77.97    81.03
    SCAFFOLD  92.50  78.09         77.23    80.67
    FedNova   94.03  79.93         76.39    79.26
    FedCD     94.42  82.58         79.35    84.00

    FedCD, in its own protocol        --config configs/pacs.py:protocol=fedcd
    another method in that protocol   --config configs/pacs.py:protocol=fedcd,method=fedavg
    FedCD in FedIG's protocol         --config configs/pacs.py:method=fedcd,adaptations=running
    amplitude mix, its row AM         ...:protocol=fedcd,method=fedavg,data.perturb=amplitude_mix
    SCI alone, REA alone              ...:protocol=fedcd,weigh=by_size
                                      ...:protocol=fedcd,method=fedavg,weigh=risk_extrapolation

Only protocol= chooses a protocol: method=fedcd after the colon and --config.method=fedcd both keep
FedIG's. FedCD names no weights to start from, no optimizer and no augmentation: SGD with momentum
0.9 and DomainBed's are our choice, and the start is what config.pretrained says, here too: at
random unless it is given. The numbers of its Table 1 are like those that FedIG prints from
ImageNet's weights. It names no validation samples and no way to select a round: a tenth validates,
as in the lists that PACS comes with, each client's by its own model.

Small, on a CPU, from random weights:
    --config.model=ResNet10:width=16 --config.data.image_size=64 --config.rounds=10
    --config.local_steps=20 --config.batch_size=32 --config.optimizer.learning_rate=0.03
    --config.optimizer.momentum=0.9 --config.data.validation=0.1 --config.validate_with=own
    --config.baselines=fedavg
It takes some minutes. FedCD in its own protocol is :protocol=fedcd with the same keys but
local_steps=0, so that a round is an epoch, local_epochs=1 and no baselines. With local_steps=20
its rounds would be as short as FedIG's.

Small, on a CPU, from ImageNet's weights, RESNET50 as in launch/convert/keras_resnet.py:
    python launch/convert/keras_resnet.py RESNET50 resnet50_7.safetensors --classes 7
    python launch/convert/frozen_maps.py PATH resnet50_7.safetensors maps.npz
    --config configs/pacs.py:protocol=small --config.data.path=maps.npz
    --config.pretrained=resnet50_7.safetensors
Clients train the last block of ResNet-50 and a classifier that starts at 0. What is before is
frozen, so its outputs for images of 96 pixels are computed once. No augmentation, equal clients,
the last round. A run takes one to five minutes, 3 GB of memory and 370 MB for the maps.
"""

import re

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, choose, override

PROTOCOLS = {
    "fedig": "",
    "small": "data.name=npz,data.image_size=3,model=ResNet50:keras=True:after=layer4_1,rounds=10,"
    "local_steps=20,local_selection=0,batch_size=32,optimizer.learning_rate=0.02,"
    "optimizer.momentum=0.9,optimizer.schedule=cosine,weigh=uniform,eval_every=10,"
    "checkpoint_every=10,data.augment=none,data.validation=0.02",
    "fedcd": "method=fedcd,local_steps=0,local_epochs=5,local_selection=0,batch_size=16,"
    "adaptations=running,optimizer.learning_rate=0.001,optimizer.momentum=0.9,data.validation=0.1,"
    "validate_with=own",
}


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fediga"
    config.model = "ResNet18"
    config.rounds = 40
    config.local_steps = 200
    config.local_selection = 20  # A.2
    config.batch_size = 64
    config.optimizer.learning_rate = 0.01
    config.optimizer.momentum = 0.5
    config.target = "sketch"
    config.adaptations = ("running", "zero_shot_adapter")
    config.validate_with = "global"  # A.2
    config.eval_every = 1  # the round with the best mean validation accuracy is reported
    config.checkpoint_every = 1
    config.data.name = "pacs"
    config.data.image_size = 224
    config.data.split = "holdout"  # DomainBed's, not the authors' lists
    config.data.validation = 0.2
    config.data.augment = "domainbed"
    named = re.findall(r"(?:^|,)protocol=([^,]*)", changes) or ["fedig"]
    override(config, choose(PROTOCOLS, named[-1], "protocol"))
    return override(config, re.sub(r"(^|,)protocol=[^,]*", "", changes))
