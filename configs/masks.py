r"""Any folder of images with masks, as a federation of its domains.

    python -m fedjax_bn.main --config configs/masks.py:data.test=0.2 --config.data.path=PATH

PATH is laid out as in fedjax_bn/data/masks/mask_folders.py: DOMAIN/images and DOMAIN/masks. Images
are stretched to squares of --config.data.image_size pixels, a multiple of 16 for UNet.

    leave a domain out                --config.target=NAME
    names of the classes              --config.data.classes=background,vessel
    images at their own resolution    --config.data.large=tiles
    values other than 0, 1, 2 or 255  --config.data.classes=background=0,disc=128,cup=255
    other names of masks              --config.data.pairs='images/{}.jpg,truth/{}.png'
    intensities of CT scans           --config.data.window=-160,240
    images of one patient together    --config.data.groups='patient\d+'

A small recipe: retinal vessels of the cameras of CHASE_DB1, STARE and VEVIO as clients and DRIVE's
as unseen one (24, 12, 16 and 15 images), a fifth of the clients' images for testing:

    --config configs/masks.py:data.image_size=96,model=UNet:width=16:levels=3,target=DRIVE,\
optimizer.learning_rate=0.002,data.test=0.2

Stretched to 96 pixels, thin vessels are narrower than a pixel.
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.baselines = ("fedavg",)
    config.model = "UNet:width=16"
    config.rounds = 30
    config.local_epochs = 1
    config.batch_size = 4
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 0.001
    config.optimizer.keep = True
    config.eval_every = 10
    config.eval_batch_size = 16
    config.adapt_batch_size = 8
    config.adaptations = ("running", "tsmobn")
    config.data.name = "masks"
    config.data.image_size = 128
    config.data.augment = "masks"
    config.data.validation = 0.1
    return override(config, changes)
