"""What a change of structure must leave as it is; `golden_values.py` says how it is computed.

The bits are those of one machine and one version of JAX; elsewhere they may differ in last places.
"""

import json

import numpy as np
import pytest

import golden_values
from fedjax_bn.run.experiment.datasets import EMBEDDED
from method_table import METHODS

OFTEN = ("fedbn", "fediga", "fedcd")


@pytest.fixture(scope="module")
def stored():
    with np.load(golden_values.FOLDER / "methods.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in METHODS]
)
def test_three_rounds_of_a_method_give_the_stored_state(x64, stored, name):
    found = golden_values.rounds_of(name)
    assert found.keys() == {key.removeprefix(name) for key in stored if key.startswith(f"{name}[")}
    for leaf, values in found.items():
        np.testing.assert_allclose(values, stored[f"{name}{leaf}"], 1e-9, 1e-12, err_msg=leaf)


def test_packaged_configs_have_the_stored_keys():
    assert golden_values.config_keys() == _read("configs")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("signs")) for n in EMBEDDED]
)
def test_embedded_data_have_the_stored_fingerprint(name):
    assert golden_values.fingerprint_of(name) == _read("data")[name]


def _read(name):
    return json.loads((golden_values.FOLDER / f"{name}.json").read_text())
