"""Holds the parts of `benchmarks/flower.py`: one process, one task, federations over loopback."""

from pathlib import Path

from ml_collections import ConfigDict

# Two of the quickstart's scanners. If a scanner has several clients, each draws 180 of its images,
# so that each trains as long as a client of the quickstart.
CONFIG = """
from fedjax_bn.run.config import override
from fedjax_bn.run.config.file import read

def get_config(changes=""):
    config = read("quickstart")
    config.baselines, config.adaptations, config.mesh.clients = (), ("running",), 1
    config.target = "microfilm,thermal,magazine,fax"
    config.eval_every = 1000
    config.model, config.batch_size = "SmallDigitCNN", 32
    config.optimizer.momentum = 0.0
    config.data.num_clients, config.data.partition = {clients}, "drawn:samples=180"
    return override(config, changes)
"""


def write_config(folder: Path, clients: int) -> None:
    """Writes the federation's config.py into an app's folder."""
    (folder / "config.py").write_text(CONFIG.format(clients=clients))


def configured(folder: Path, changes: str) -> ConfigDict:
    """Returns the configuration of a folder's config.py with changes `key=value,...`."""
    from fedjax_bn.flower.settings import config_of

    return config_of("config.py", changes, folder)
