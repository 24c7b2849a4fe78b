"""config.json records what bits depend on; a run that continues elsewhere prints what differs."""

import json
import os

import jax

import runs
from fedjax_bn.run import train
from fedjax_bn.training import workdir


def test_what_bits_depend_on_is_recorded_and_what_has_changed_is_said_once(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    monkeypatch.setattr(train, "_finish", lambda *given: {})  # stopped before its first round
    said = []
    for _ in range(2):
        train.run(runs.config(), tmp_path, say=said.append)
    assert said == []
    about = workdir.read_json(tmp_path / "config.json")
    machine, cores = about["machine"], len(os.sched_getaffinity(0))
    assert machine["backend"] == jax.default_backend()
    assert machine["device_kind"] == jax.devices()[0].device_kind
    assert machine["cores"] == cores
    assert machine["environment"]["XLA_FLAGS"] == os.environ.get("XLA_FLAGS", "")
    assert machine["options"]["enable_x64"] is False
    assert machine["cpu"]

    machine |= {"cores": 96, "environment": {"XLA_FLAGS": "--fast", "NPROC": ""}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    train.run(runs.config(), tmp_path, say=said.append)
    (sentence,) = said
    assert f"cores (96 there, {cores} now)" in sentence
    assert "environment.XLA_FLAGS ('--fast' there, " in sentence
