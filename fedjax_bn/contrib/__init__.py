"""Methods of other papers, with which the papers of this library compare theirs; one file each.

Each function returns a `federation.FederatedMethod`, as those of `fedjax_bn.methods` do, and takes
a model, a local optimizer and the options of `methods.fedavg`, some without `server`. The docstring
of each method names its paper, its equation and what differs from the authors' code. Features are
those that `fedjax_bn.models.classifier` defines.

A model without what a method reads of it raises ValueError at `init` or, where only a pass shows
it, at `round`. To import this package also registers the methods' hooks (`models.hooks`), which
variables read from a file may need.
"""

from fedjax_bn.contrib.apfl import apfl
from fedjax_bn.contrib.copa import copa
from fedjax_bn.contrib.csac import csac
from fedjax_bn.contrib.csd import csd
from fedjax_bn.contrib.ditto import ditto
from fedjax_bn.contrib.fedadg import fedadg
from fedjax_bn.contrib.fedala import fedala
from fedjax_bn.contrib.fedawa import fedawa
from fedjax_bn.contrib.fedbabu import fedbabu
from fedjax_bn.contrib.feddg import feddg
from fedjax_bn.contrib.feddyn import feddyn
from fedjax_bn.contrib.fedfa import fedfa
from fedjax_bn.contrib.fedlws import fedlws
from fedjax_bn.contrib.fedrdn import fedrdn
from fedjax_bn.contrib.fedrep import fedrep
from fedjax_bn.contrib.fedrod import fedrod
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
    "apfl", "copa", "csac", "csd", "ditto", "fedadg", "fedala", "fedawa", "fedbabu", "feddg",
    "feddyn", "fedfa", "fedlws", "fedrdn", "fedrep", "fedrod", "fedsam", "fedsr", "fedwon", "fixbn",
    "gperxan", "harmofl", "hbn", "jigen", "l2d", "mixstyle", "pn", "randconv", "rsc", "selfreg",
    "sfa", "snr",
]  # fmt: skip
