"""Prostate in MRI of six sites, in HarmoFL's and FL-MedSegBench's protocols and in one by patient.

    python -m fedjax_bn.main --config configs/prostate.py --config.data.path=PATH

PATH is laid out as in fedjax_bn/data/masks/prostate.py; NIfTI needs pip install 'fedjax_bn[nifti]'.
The slices take 1 GB or more in the folder config.data.cache, and as much in memory. A U-Net of
HarmoFL's size trains on all slices of 384 x 384 pixels; 70, 10 and 20 % of the patients of a site
train, validate and test, and Dice is of a patient's volume.

    HarmoFL's protocol            --config configs/prostate.py:protocol=harmofl
    FL-MedSegBench's protocol     --config configs/prostate.py:protocol=fl_medsegbench
    another method in it          ...:protocol=harmofl,method=harmofl
    FedDG's task, a site unseen   ...:protocol=feddg,target=UCL    (target=each: all in turn)

Only protocol= chooses a protocol. Published Dice are not printed here: neither code has its results
in a file, and we did not have the papers' tables at hand.

HarmoFL (Jiang et al., AAAI 2022; github.com/med-air/HarmoFL, fed_train.py and utils/dataset.py):
500 rounds of one epoch, batches of 16, Adam with learning rate 1e-4 and weight decay 1e-4, clients
weighed equally and cut to the smallest, random quarter turns and flips, the round by the mean
validation Dice. What differs: the order in which slices are divided is ours, because theirs is in
arrays beside their code; validation samples are cut too; Dice is of the tested slices of a patient
together and of the prostate, theirs the mean over slices of the prostate's and the background's,
where a slice without prostate has 0 for it; images are bytes/255, theirs bytes; our U-Net's
batch norm is the usual one. Slices of one patient train and test there, so that its scores are not
those of new patients.

FL-MedSegBench (Zhu et al. 2026; github.com/meiluzhu/FL-MedSegBench, datasets.py and scripts/): 400
rounds of one epoch, batches of 8, Adam with learning rate 1e-4, the middle 256 x 256 pixels of
labelled slices, each repeated as three channels, random quarter turns and flips. What differs: the
patients of the parts are drawn by us, and Dice is of a patient's slices together.

FedDG (Liu et al., CVPR 2021; github.com/liuquande/FedDG-ELCFS, train_ELCFS.py): 100 rounds of one
epoch, batches of 5, Adam with learning rate 1e-3, one site unseen. That code trains on fundus
images; we take its settings for the prostate too. What differs: a tenth of each other site's
patients validates; a client sends the amplitudes of five slices (feddg:spectra=5), there of all;
the adaptation `batch` has the statistics of its test, which runs in training mode, but its
threshold of 0.75 and its largest component are not applied.
"""

import re

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, choose, override

_TURNS = "data.augment=masks:quarters=1.0:rotate=0:scale=0:shift=0:brightness=0:contrast=0:gamma=0"
PROTOCOLS = {
    "patients": "",
    "harmofl": "data.protocol=harmofl,rounds=500,batch_size=16,optimizer.weight_decay=1e-4,"
    f"weigh=uniform,data.truncate=True,data.split=official,eval_every=1,checkpoint_every=1,{_TURNS}",
    "fl_medsegbench": "data.protocol=fl_medsegbench,data.image_size=256,rounds=400,"
    f"data.split=official,{_TURNS}",
    "feddg": "method=feddg:spectra=5:order=1,rounds=100,batch_size=5,"
    "optimizer.learning_rate=1e-3,target=UCL,data.test=0.0,data.augment=none,adaptations=batch",
}


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.model = "UNet"
    config.rounds = 200
    config.local_epochs = 1
    config.batch_size = 8
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 1e-4
    config.optimizer.keep = True
    config.eval_every = 5
    config.eval_batch_size = 16
    config.adapt_batch_size = 16
    config.adaptations = ("running", "tsmobn")
    config.data.name = "prostate"
    config.data.image_size = 384
    config.data.split = "stratified"
    config.data.validation = 0.1
    config.data.test = 0.2
    config.data.augment = "masks"
    named = re.findall(r"(?:^|,)protocol=([^,]*)", changes) or ["patients"]
    override(config, choose(PROTOCOLS, named[-1], "protocol"))
    return override(config, re.sub(r"(^|,)protocol=[^,]*", "", changes))
