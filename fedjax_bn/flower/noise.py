"""Noise that nobody takes away: over Flower, who adds it draws its key.

The run config, and with it `config.seed` and `config.privacy.seed`, is known to the server and to
all clients. So the side that `config.privacy.at` names uses numbers of the operating system for its
noise, which never leave it; numbers of a run with noise are not repeated by another. Where
`config.privacy.seed` is set they are, as those of the simulation, and the noise protects nobody.
"""

import secrets

import jax
from ml_collections import ConfigDict

from fedjax_bn.run.experiment.start import Keys


def of_client(config: ConfigDict, keys: Keys) -> Keys:
    """The keys of one training of a client; where it adds noise, with a fresh one for the method.

    No two trainings have the same noise, so that the difference of two answers tells nothing.

    Args:
      config: of the run.
      keys: those that `config.seed` gives.
    """
    if not _adds("client", config):
        return keys
    key = jax.random.key(secrets.randbits(32))
    return keys._replace(method=jax.random.fold_in(key, secrets.randbits(32)))


def of_server(config: ConfigDict) -> ConfigDict:
    """The configuration from which the server's step is built; where it adds noise, a fresh seed.

    What the server keeps of its noise is in its checkpoints, from which a run goes on.

    Args:
      config: of the run; it stays as it is, and is what may be written and sent.
    """
    if not _adds("server", config):
        return config
    config = config.copy_and_resolve_references()
    config.privacy.seed = secrets.randbits(32)
    return config


def _adds(side: str, config: ConfigDict) -> bool:
    keys = config.privacy
    return bool(keys.clip and keys.noise and keys.at == side and keys.seed is None)


def warning(config: ConfigDict) -> str:
    """What the server says where the noise is no secret; empty where it is, or there is none."""
    keys = config.privacy
    if not (keys.clip and keys.noise) or keys.seed is None:
        return ""
    return (
        f"privacy.seed={keys.seed} makes noise that can be repeated, as in a simulation: whoever "
        "knows the run config takes it away, so leave privacy.seed empty where it is to protect"
    )
