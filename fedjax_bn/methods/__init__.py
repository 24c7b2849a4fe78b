"""Federated methods, one file each; all return a `federation.FederatedMethod`."""

from fedjax_bn.methods.fedavg import fedavg
from fedjax_bn.methods.fedbn import fedbn
from fedjax_bn.methods.fedprox import fedprox
from fedjax_bn.methods.silobn import silobn
from fedjax_bn.methods.singleset import singleset

__all__ = ["fedavg", "fedbn", "fedprox", "silobn", "singleset"]
