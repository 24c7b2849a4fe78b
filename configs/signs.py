"""FedBN beside FedAvg and SingleSet in finding and reading signs in the weather; no download.

    python -m fedjax_bn.main --config configs/signs.py

Clear, night, fog and rain are clients, dusk is the unseen scene (fedjax_bn/data/sets/signs.py). A
narrow TinyDetector finds round signs and reads their digits; scores are mAP50 in percent. The
images are those of seed 0 whatever `seed` is; `--config.data.name=signs` draws them by it.

    the colour of the rim predicts the digit, but not in dusk    --config.data.name=signs_shortcut
    FedCD, its SCI alone, its REA alone                       --config.method=fedcd
                                       --config.method=fedcd --config.weigh=by_size
                                       --config.method=fedavg --config.weigh=risk_extrapolation
    a detector four times as large                            --config.model=TinyDetector

Digits are not mirrored: no one writes them so. launch/sweeps/signs.py has all methods.
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.baselines = ("singleset", "fedavg")
    config.model = "TinyDetector:width=8"
    config.rounds = 60
    config.local_epochs = 1
    config.batch_size = 8
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 0.004
    config.optimizer.schedule = "cosine"
    config.optimizer.keep = True
    config.eval_every = 15
    config.eval_batch_size = 50
    config.target = "dusk"
    config.adaptations = ("batch", "tsmobn")
    config.task = "detection:class_gain=2.0"  # digits are harder to read than signs to find
    config.data.name = "signs:seed=0"
    config.data.image_size = 96
    config.data.augment = "boxes:flip=0.0:scale=0.25:shift=0.1:hue=0.015:saturation=0.3:value=0.3"
    return override(config, changes)
