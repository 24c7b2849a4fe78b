"""What `benchmarks/flower.py` measures: one process, its parts, and federations over loopback."""

from pathlib import Path

from ml_collections import ConfigDict

# Two of the quickstart's scanners; where they are several clients, each draws 180 images of its own
# from one, so that all train as long as the quickstart's.
CONFIG = """
from fedjax_bn.run.config.keys import override
from fedjax_bn.run.config.file import read

def get_config(changes=""):
    config = read("quickstart")
    config.baselines, config.adaptations, config.mesh.clients = (), ("running",), 1
    config.target = "microfilm,thermal,magazine,fax"
    config.eval_every = 1000
    config.data.num_clients, config.data.partition = {clients}, "drawn:samples=180"
    return override(config, changes)
"""


def write_config(folder: Path, clients: int) -> None:
    """Writes the federation's config.py into an app's folder."""
    (folder / "config.py").write_text(CONFIG.format(clients=clients))


def configured(folder: Path, changes: str) -> ConfigDict:
    """Returns the configuration of that file with `key=value,...` changed."""
    from fedjax_bn.flower.settings import config_of

    return config_of("config.py", changes, folder)
