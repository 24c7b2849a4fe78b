"""Deploys the methods over Flower: makes a `ClientApp` and a `ServerApp` from a config file.

    from fedjax_bn.flower import client_app, server_app

`launch/flower` is an app that is ready to run, and `docs/deployment.md` lists what travels and what
stays with a client. It needs `pip install 'fedjax_bn[flower]'`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_bn.flower.server import server_app
    from fedjax_bn.flower.site import client_app

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:
    # At first use: Flower starts a process for every task of a client, without the server's code.
    if name in __all__:
        module = "site" if name == "client_app" else "server"
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
