"""TsmoBN on the same samples in ten orders (Jiang et al. 2021, Fig. 3c).

    python -m fedjax_bn.main --config configs/tsmobn_order.py --config.data.path=PATH

The paper's result: accuracy hardly depends on the order. It does where samples come class after
class: order=-1 keeps the order of storage, and image files are often stored so. The text does not
state how many orders Fig. 3c has; ten is our number. Fig. E.5 has five (E.2.4). Fig. 3c is a box
plot over three seeds, which launch/sweeps/tsmobn.py draws.
As in the paper the unseen clients are two hospitals of Camelyon17; configs/camelyon17.py has the
setting and describes PATH. They are tested once, in the round with the best mean validation
accuracy.

    plot             plots/unseen-tsmobn-order.png in the workdir
    other methods    --config.method=fedbn    (fedprox, fednova, fedadam)

This command tests a finished run of any method and data in this way, without training:

    python -m fedjax_bn.main evaluate --workdir DIR --config configs/tsmobn_order.py:CHANGES

where CHANGES name its data, for CIFAR-10-C (E.2.3) such as data.name=cifar10_c,data.path=PATH,
data.image_size=256,data.severities=1,target=noise, for digits data.name=digits,data.path=PATH,
target=mnist.

Small, with no download: the small run of configs/camelyon17.py with --workdir DIR, then
    python -m fedjax_bn.main evaluate --workdir DIR --config
    configs/tsmobn_order.py:data.name=scanners,data.split=,data.image_size=28,target=fax
It takes some seconds. Over the seeds 0, 1 and 2 of that run the unseen scanner has means of 41.6 to
43.8 % over the ten orders, where running statistics have 12.8 (2.9) (chance 10).
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import override
from fedjax_bn.run.config.file import read


def get_config(changes: str = "") -> ConfigDict:
    config = read("configs/camelyon17.py")
    config.method = "fedavg"
    config.adaptations = ("running", *(f"tsmobn:order={n}" for n in range(10)))
    config.eval_also = ()  # so many adaptations take time
    return override(config, changes)
