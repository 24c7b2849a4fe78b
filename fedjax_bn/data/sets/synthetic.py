"""FedBN's synthetic data: two pairs of Gaussians (Appendix F).

Reference: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
ICLR 2021.
"""

import numpy as np

from fedjax_bn.data.seeds import generator
from fedjax_bn.data.source import TEST, TRAIN, Pool, Source


def load_synthetic(
    *, seed: int = 0, samples: int = 1000, dimension: int = 10, correlation: float = -0.5
) -> Source:
    """Returns "synthetic", f32[2 * samples, dimension]: two clients with two Gaussian classes each.

    The classes lie around -1 (label 0) and 1 and have one covariance: "identity" has the identity
    matrix, "correlated" the matrix correlation^|i - j|, with the same variances but not diagonal.
    Each client has `samples` to train and as many to test, half of each class.

    Differs from the paper: it leaves the off-diagonal entries and the number of samples open. With
    a negative correlation, both clients' classes can be separated, as the paper's accuracies
    require (the best possible error is below 0.1 %; a correlation of 0.5 would give 3 %).
    """
    count, pools = 2 * samples, []
    labels = np.arange(count, dtype=np.int32) % 2
    parts = np.where(np.arange(count) < samples, TRAIN, TEST).astype(np.int8)
    for position, (name, ratio) in enumerate((("identity", 0.0), ("correlated", correlation))):
        noise = generator(seed, position).standard_normal((count, dimension))
        # Step by step rather than by a matrix product, whose last bits depend on the machine
        for feature in range(1, dimension):
            noise[:, feature] *= np.sqrt(1 - ratio**2)
            noise[:, feature] += ratio * noise[:, feature - 1]
        images = (noise + (2 * labels[:, None] - 1)).astype(np.float32)
        names = np.array([f"{name}/{i}" for i in range(count)])
        pools.append(Pool(name, images, labels, names, parts))
    return Source("synthetic", ("minus", "plus"), tuple(pools), mean=(0.0,), std=(1.0,))
