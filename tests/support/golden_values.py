"""Values that a change of the code's structure must not change, and how they are computed.

`python tests/support/golden_values.py` writes them to its `goldens`: the float64 state after three
rounds of every method, the keys of every packaged config, and fingerprints of embedded data. A
change that means to change one of them writes them again and says why in its commit message.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from federations import ON_MAPS, MapNet, PlainNet, batches_of, variables_of
from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.run.config import base, flatten
from fedjax_bn.run.config.file import packaged_configs, read
from fedjax_bn.run.experiment.datasets import EMBEDDED, configured_clients
from method_table import METHODS

FOLDER = Path(__file__).parent / "goldens"
WITHOUT_BATCH_NORM = ("fedwon",)
# Who takes part in each of three rounds of three clients.
PRESENT = ((True, True, True), (True, False, True), (True, True, False))


def rounds_of(name: str) -> dict[str, np.ndarray]:
    """Leaves of a method's state after three rounds, and the last metrics; needs x64."""
    net = PlainNet() if name in WITHOUT_BATCH_NORM else MapNet()
    options = ON_MAPS.get(name, {})
    method = METHODS[name](net, optax.sgd(0.1, momentum=0.5), clients="map", **options)
    key = jax.random.key(1)
    variables = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables_of(net))
    state, metrics = method.init(key, variables, 3), {}
    who = {"client": jnp.arange(3, dtype=jnp.int32), "population": jnp.asarray(3, jnp.int32)}
    for present in PRESENT:
        batches = batches_of((9, 4, 6)) | who | {"participates": jnp.asarray(present)}
        state, metrics = method.round(state, batches, key)
    leaves = jax.tree_util.tree_leaves_with_path({"state": state, "metrics": metrics})
    return {jax.tree_util.keystr(path): _numbers(leaf) for path, leaf in leaves}


def _numbers(leaf: jax.Array) -> np.ndarray:
    typed = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if typed else leaf)


def config_keys() -> dict[str, dict]:
    """All keys with their defaults as "base", and of every packaged config those that differ."""
    found = {name: dict(flatten(read(name))) for name in sorted(packaged_configs())}
    defaults = dict(flatten(base()))
    for name, keys in found.items():
        found[name] = {key: value for key, value in keys.items() if value != defaults[key]}
    return json.loads(json.dumps({"base": defaults} | found))


def fingerprint_of(name: str) -> str:
    """The fingerprint of the split of a data set that the package holds or generates."""
    config = read("quickstart")
    config.data.name, config.target = name, ""
    return fingerprint(configured_clients(EMBEDDED[name](config), config)[0])


def main() -> None:
    """Writes all of them."""
    FOLDER.mkdir(exist_ok=True)
    with jax.enable_x64(True):
        arrays = {
            f"{name}{leaf}": values for name in METHODS for leaf, values in rounds_of(name).items()
        }
    np.savez_compressed(FOLDER / "methods.npz", **arrays)
    found = {"configs": config_keys(), "data": {name: fingerprint_of(name) for name in EMBEDDED}}
    for name, content in found.items():
        text = json.dumps(content, indent=1, sort_keys=True)
        (FOLDER / f"{name}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
