"""Runs UniFed's Tables 2 and 3 and Fig. 3 at a size that two CPU cores can train.

    python launch/sweeps/unifed_small.py [--only "Table 2"] [--data.cifar10=PATH]     see sweep.py

PATH is the folder of CIFAR-10-C. The runs are those of launch/sweeps/unifed.py, but with
configs/cifar10_c_small.py: 32 pixels a side, a small network from random weights, severity 5, few
rounds; two seeds of the internal protocol and one of the external.
"""

import sys

from plan import Sweep
from sweep import main
from unifed import convergence, protocols, table2, table3

INSIDE, LEFT_OUT = protocols("configs/cifar10_c_small.py", {"data.path": "cifar10"}, 2, 1, {})
SWEEP = Sweep(
    "unifed_small",
    "UniFed (Jiang et al.), reduced",
    (table2(INSIDE), table3(LEFT_OUT)),
    (convergence(INSIDE),),
)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
