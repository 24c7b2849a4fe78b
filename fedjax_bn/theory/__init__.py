"""What FedBN and UniFed prove, in numbers: kernels, eigenvalues, rates, bounds; and figures."""

from fedjax_bn.theory import bounds
from fedjax_bn.theory.convergence import (
    Course,
    Data,
    Network,
    data_from,
    evolution,
    gram,
    initialize,
    least_eigenvalue,
    predict,
    predicted,
    race,
    same_client,
    sampled_gram,
    train,
)

__all__ = [
    "Course",
    "Data",
    "Network",
    "bounds",
    "data_from",
    "evolution",
    "gram",
    "initialize",
    "least_eigenvalue",
    "predict",
    "predicted",
    "race",
    "same_client",
    "sampled_gram",
    "train",
]
