"""UniFed's Tables 2 and 3 and Fig. 3 at a size that two CPU cores carry.

    python launch/sweeps/unifed_small.py list|run|report --workdir DIR --data.cifar10=PATH

PATH is CIFAR-10 or a part of it. As launch/sweeps/unifed.py, but by configs/cifar10_c_small.py: 32
pixels a side, a small network from random weights, severity 5, few rounds; two seeds of the
internal protocol and one of the external.
"""

import sys

from plan import Sweep
from sweep import main
from unifed import cifar_runs, convergence, table2, table3

RUNS = tuple(cifar_runs("configs/cifar10_c_small.py", 2, 1, "cifar10"))
SWEEP = Sweep(
    "UniFed (Jiang et al.), reduced",
    RUNS,
    lambda: [table2(RUNS), table3(RUNS)],
    lambda: [convergence(RUNS)],
)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
