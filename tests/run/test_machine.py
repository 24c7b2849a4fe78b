"""config.json records what bits depend on; a run that continues elsewhere prints what differs."""

import json
import os

import jax
import pytest

import runs
from fedjax_bn.run import train
from fedjax_bn.training import workdir


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A workdir whose run was stopped before its first round."""
    runs.install(monkeypatch)
    monkeypatch.setattr(train, "_finish", lambda *given: {})
    runs.run(tmp_path / "run")
    return tmp_path / "run"


def edit(folder, **machine):
    content = workdir.read_json(folder / "config.json")
    content["machine"] |= machine
    (folder / "config.json").write_text(json.dumps(content))


def test_config_json_records_what_bits_depend_on(begun):
    found = workdir.read_json(begun / "config.json")["machine"]
    assert found["backend"] == jax.default_backend()
    assert found["device_kind"] == jax.devices()[0].device_kind
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["environment"]["XLA_FLAGS"] == os.environ.get("XLA_FLAGS", "")
    assert found["options"]["enable_x64"] is False
    assert found["cpu"]


def test_what_has_changed_since_is_said_once_and_is_no_error(begun):
    said = []
    train.run(runs.config(), begun, say=said.append)
    assert said == []
    edit(begun, cores=96, environment={"XLA_FLAGS": "--fast", "NPROC": ""})
    train.run(runs.config(), begun, say=said.append)
    (sentence,) = said
    assert f"cores (96 there, {len(os.sched_getaffinity(0))} now)" in sentence
    assert "environment.XLA_FLAGS ('--fast' there, " in sentence
