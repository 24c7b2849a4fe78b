"""Federated methods: each function returns a `federation.FederatedMethod`.

The papers' own methods and the usual baselines, such as FedProx, are here. The other methods that
the papers compare with are in `fedjax_bn.rivals` and are imported at their first use. Every method
takes a model, a local optimizer and the options of `fedavg`, some without `server`. A method whose
model is "images -> logits" needs a classification task. A number outside the range in its
description, or an option of a wrong type, raises ValueError when the method is built.
"""

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from fedjax_bn.rivals.apfl import apfl
    from fedjax_bn.rivals.copa import copa
    from fedjax_bn.rivals.csac import csac
    from fedjax_bn.rivals.csd import csd
    from fedjax_bn.rivals.ditto import ditto
    from fedjax_bn.rivals.fedadg import fedadg
    from fedjax_bn.rivals.fedala import fedala
    from fedjax_bn.rivals.feddg import feddg
    from fedjax_bn.rivals.fedfa import fedfa
    from fedjax_bn.rivals.fedrdn import fedrdn
    from fedjax_bn.rivals.fedrep import fedrep
    from fedjax_bn.rivals.fedsam import fedsam
    from fedjax_bn.rivals.fedsr import fedsr
    from fedjax_bn.rivals.fedwon import fedwon
    from fedjax_bn.rivals.fixbn import fixbn
    from fedjax_bn.rivals.gperxan import gperxan
    from fedjax_bn.rivals.harmofl import harmofl
    from fedjax_bn.rivals.hbn import hbn
    from fedjax_bn.rivals.jigen import jigen
    from fedjax_bn.rivals.l2d import l2d
    from fedjax_bn.rivals.mixstyle import mixstyle
    from fedjax_bn.rivals.pn import pn
    from fedjax_bn.rivals.randconv import randconv
    from fedjax_bn.rivals.rsc import rsc
    from fedjax_bn.rivals.selfreg import selfreg
    from fedjax_bn.rivals.sfa import sfa
    from fedjax_bn.rivals.snr import snr

__all__ = [
    "apfl", "copa", "csac", "csd", "ditto", "fedadagrad", "fedadam", "fedadg", "fedala", "fedavg",
    "fedavgm", "fedbn", "fedcd", "feddc", "feddg", "fedfa", "fedig", "fediga", "fednova", "fedprox",
    "fedrdn", "fedrep", "fedsam", "fedsr", "fedwon", "fedyogi", "fixbn", "gperxan", "harmofl",
    "hbn", "jigen", "l2d", "mixstyle", "moon", "perfedavg", "pn", "randconv", "rsc", "scaffold",
    "selfreg", "sfa", "silobn", "singleset", "snr",
]  # fmt: skip

USUAL = "fedbn"  # the method if a configuration does not name one


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    method = getattr(importlib.import_module(f"fedjax_bn.rivals.{name}"), name)
    globals()[name] = method
    return method


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
