"""The theory of FedBN and UniFed in numbers: kernels, eigenvalues, rates, bounds, figures."""
