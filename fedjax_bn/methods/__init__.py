"""Federated methods: each function returns a `federation.FederatedMethod`.

The papers' own methods and the usual baselines, such as FedProx, are here; the other methods that
the papers compare with are in `fedjax_bn.contrib`. Every method takes a model, a local optimizer
and the options of `fedavg`, some without `server`. A method whose model is "images -> logits" needs
a classification task. A number outside the range in its description, or an option of a wrong type,
raises ValueError when the method is built.
"""

from fedjax_bn.methods.fedadam import fedadagrad, fedadam, fedavgm, fedyogi
from fedjax_bn.methods.fedavg import fedavg
from fedjax_bn.methods.fedbn import fedbn, silobn, singleset
from fedjax_bn.methods.fedcd import fedcd
from fedjax_bn.methods.feddc import feddc
from fedjax_bn.methods.fedig import fedig, fediga
from fedjax_bn.methods.fednova import fednova
from fedjax_bn.methods.fedprox import fedprox
from fedjax_bn.methods.moon import moon
from fedjax_bn.methods.perfedavg import perfedavg
from fedjax_bn.methods.scaffold import scaffold

__all__ = [
    "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedbn", "fedcd", "feddc", "fedig", "fediga",
    "fednova", "fedprox", "fedyogi", "moon", "perfedavg", "scaffold", "silobn", "singleset",
]  # fmt: skip
