"""Deploys the methods over Flower: makes a `ClientApp` and a `ServerApp` from a config file.

    from fedjax_bn.flower import client_app, server_app

`launch/flower` is an app that is ready to run; `docs/deployment.md` lists what travels, what stays
with a client, and when a client is left out of a round. The results equal those of `fedjax-bn` with
the same configuration and clients.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_bn.flower.server import server_app
    from fedjax_bn.flower.site import client_app

if find_spec("flwr") is None:
    raise ImportError("fedjax_bn.flower needs Flower: pip install 'fedjax_bn[flower]'")

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:
    # At first use: Flower starts a process for every task of a client, without the server's code.
    if name in __all__:
        module = "site" if name == "client_app" else "server"
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
