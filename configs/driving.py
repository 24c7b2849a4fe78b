"""Cityscapes, Mapillary Vistas and BDD100K, leaving one out (FedCD, Ma et al. 2024: Table 2).

    python -m fedjax_bn.main --config configs/driving.py --config.data.path=PATH

PATH holds the domains cityscapes, vistas and bdd100k in COCO's form, which three commands make:

    python launch/convert/cityscapes.py CITYSCAPES PATH/cityscapes
    python launch/convert/vistas.py VISTAS PATH/vistas
    python launch/convert/bdd100k.py BDD100K PATH --by all

The target is one of them; the other two are clients. mAP50 in percent on the target:

                      C      M      B      Avg
    FedAvg            43.39  35.49  39.69  39.52
    FedProx           44.10  35.56  40.10  39.92
    FedSAM            43.61  33.77  44.14  40.51
    FedDG-GA          43.75  35.49  40.94  40.06
    FedCD-SCI         46.47  40.00  44.50  43.65
    FedCD-SCI + REA   46.67  41.37  46.56  44.86

    all three targets in turn   --config.target=each
    SCI alone, REA alone        --config.weigh=by_size
                                --config.method=fedavg --config.weigh=risk_extrapolation

The paper cites Mapillary's depth dataset, which has no boxes; Vistas must be meant. What else it
leaves open, and our choices, are in configs/bdd100k.py; also: the eight classes that all three
have, boxes of instances' pixels where there are such, and each dataset's own validation images.
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedcd"
    config.model = "YOLOv5s"
    config.rounds = 200
    config.local_epochs = 1
    config.batch_size = 4
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 1.6e-4
    config.optimizer.momentum = 0.937
    config.optimizer.nesterov = True
    config.optimizer.weight_decay = 5e-4
    config.optimizer.keep = True
    config.eval_every = 10
    config.eval_also = ()
    config.eval_batch_size = 16
    config.adapt_batch_size = 16
    config.target = "cityscapes"
    config.data.name = "driving"
    config.data.image_size = 640
    config.data.augment = "boxes"
    return override(config, changes)
