"""Federated methods: each function returns a `federation.FederatedMethod`.

The papers' own methods and the usual baselines, such as FedProx, are here. The other methods that
the papers compare with are in `fedjax_bn.contrib` and are imported at their first use. Every method
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
    from fedjax_bn.contrib.apfl import apfl
    from fedjax_bn.contrib.copa import copa
    from fedjax_bn.contrib.csac import csac
    from fedjax_bn.contrib.csd import csd
    from fedjax_bn.contrib.ditto import ditto
    from fedjax_bn.contrib.fedadg import fedadg
    from fedjax_bn.contrib.fedala import fedala
    from fedjax_bn.contrib.feddg import feddg
    from fedjax_bn.contrib.fedfa import fedfa
    from fedjax_bn.contrib.fedrdn import fedrdn
    from fedjax_bn.contrib.fedrep import fedrep
    from fedjax_bn.contrib.fedsam import fedsam
    from fedjax_bn.contrib.fedsr import fedsr
    from fedjax_bn.contrib.fedwon import fedwon
    from fedjax_bn.contrib.fixbn import fixbn
    from fedjax_bn.contrib.gperxan import gperxan
    from fedjax_bn.contrib.harmofl import harmofl
    from fedjax_bn.contrib.hbn import hbn
    from fedjax_bn.contrib.jigen import jigen
    from fedjax_bn.contrib.l2d import l2d
    from fedjax_bn.contrib.mixstyle import mixstyle
    from fedjax_bn.contrib.pn import pn
    from fedjax_bn.contrib.randconv import randconv
    from fedjax_bn.contrib.rsc import rsc
    from fedjax_bn.contrib.selfreg import selfreg
    from fedjax_bn.contrib.sfa import sfa
    from fedjax_bn.contrib.snr import snr

__all__ = [
    "apfl", "copa", "csac", "csd", "ditto", "fedadagrad", "fedadam", "fedadg", "fedala", "fedavg",
    "fedavgm", "fedbn", "fedcd", "feddc", "feddg", "fedfa", "fedig", "fediga", "fednova", "fedprox",
    "fedrdn", "fedrep", "fedsam", "fedsr", "fedwon", "fedyogi", "fixbn", "gperxan", "harmofl",
    "hbn", "jigen", "l2d", "mixstyle", "moon", "perfedavg", "pn", "randconv", "rsc", "scaffold",
    "selfreg", "sfa", "silobn", "singleset", "snr",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    method = getattr(importlib.import_module(f"fedjax_bn.contrib.{name}"), name)
    globals()[name] = method
    return method


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
