"""The methods over Flower: a `ClientApp` and a `ServerApp` made from a config file.

    from fedjax_bn.flower import client_app, server_app

`launch/flower` is an app that is ready to run; `docs/deployment.md` says what travels, what stays
with a client, and when a client is left out of a round. The numbers are those of `fedjax-bn` with
the same configuration and clients.
"""

try:
    from fedjax_bn.flower.client import client_app as client_app
    from fedjax_bn.flower.server import server_app as server_app
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flwr":
        raise
    raise ImportError(
        "fedjax_bn.flower needs Flower, which is not installed: pip install 'fedjax_bn[flower]'"
    ) from error

__all__ = ["client_app", "server_app"]
