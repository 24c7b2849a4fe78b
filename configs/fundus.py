"""Optic disc and cup of four sites, one unseen (FedDG: Liu et al., CVPR 2021).

    python -m fedjax_bn.main --config configs/fundus.py --config.data.path=PATH

PATH holds Domain1 to Domain4 of DoFE, 101, 159, 400 and 400 images around the optic disc, as
`python launch/convert/fundus.py ORIGINAL PATH` writes them. The other three train a U-Net on
384 x 384 pixels; the classes are background, disc and cup, and the disc is scored with its cup.

    all four sites in turn          --config.target=each
    nothing unseen, DoFE's split    --config configs/fundus.py:protocol=official
    the other methods beside it     --config.baselines=fedavg,fedbn,harmofl

Published Dice are not printed here: FedDG's code has no results in a file, and we did not have the
paper's table at hand. FL-MedSegBench has fundus images too, but its task there is the vessels.

FedDG's settings (github.com/liuquande/FedDG-ELCFS, train_ELCFS.py): 100 rounds of one epoch,
batches of 5, Adam with learning rate 1e-3, clients weighed by their images. What differs: disc and
cup are two of three classes with a softmax, theirs two sigmoids; a tenth of each site validates; a
client sends the amplitudes of five images (feddg:spectra=5), theirs of all; the adaptation `batch`
has the statistics of their test, which runs in training mode, but their threshold of 0.75 and their
largest component are not applied.

The same command converts the five centres of doi.org/10.5281/zenodo.8009107 (REFUGE, Drishti,
ORIGA, BinRushed and Magrabia), which protocol=official runs too.
"""

import re

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, choose, override

PROTOCOLS = {
    "feddg": "",
    "official": "method=fedbn,target=,data.split=official,adaptations=running",
}


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "feddg:spectra=5:order=1"  # at most a batch; the order of FedDG's code
    config.model = "UNet"
    config.rounds = 100
    config.local_epochs = 1
    config.batch_size = 5
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.keep = True
    config.task = "segmentation:nested=True"
    config.eval_every = 5
    config.eval_batch_size = 16
    config.adapt_batch_size = 16
    config.adaptations = ("batch", "running")
    config.target = "Domain4"
    config.data.name = "masks"
    config.data.classes = ("background", "disc", "cup")
    config.data.image_size = 384
    config.data.split = "stratified"
    config.data.validation = 0.1
    named = re.findall(r"(?:^|,)protocol=([^,]*)", changes) or ["feddg"]
    override(config, choose(PROTOCOLS, named[-1], "protocol"))
    return override(config, re.sub(r"(^|,)protocol=[^,]*", "", changes))
