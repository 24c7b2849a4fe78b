"""Any folder of images with boxes, in YOLO's or COCO's form; domains are subfolders.

    python -m fedjax_bn.main --config configs/boxes.py:data.test=0.2 --config.data.path=PATH

PATH is laid out as in fedjax_bn/data/sets/box_folders.py. Every subfolder is a domain and a
client; a folder without such is one domain, shared out by --config.data.num_clients=2. Images keep
their shape, in grey squares of --config.data.image_size pixels, a multiple of 16 (TinyDetector) or
32.

    leave a domain out                --config.target=NAME
    some domains, some classes        --config.data.domains=a,b --config.data.classes=car,bus
    a larger detector                 --config.model=YOLOv5n --config.data.image_size=320
    your own weights to start from    --config.pretrained=FILE

A small recipe: 200 photographs of raccoons (github.com/datitran/raccoon_dataset, one class; `python
launch/convert/voc.py PATH` first) shared by two clients, tested on a fifth of them:

    --config configs/boxes.py:data.num_clients=2,data.test=0.2,data.validation=0.1
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.baselines = ("fedavg",)
    config.model = "TinyDetector"
    config.rounds = 30
    config.local_epochs = 1
    config.batch_size = 8
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 0.002
    config.optimizer.keep = True
    config.eval_every = 10
    config.eval_batch_size = 50
    config.adaptations = ("running", "tsmobn")
    config.data.name = "boxes"
    config.data.image_size = 128
    config.data.augment = "boxes"
    return override(config, changes)
