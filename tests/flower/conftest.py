"""One app for all tests of a process: clients that are configured alike compile once."""

import jax
import pytest

import runs


@pytest.fixture(scope="session")
def app_folder(tmp_path_factory):
    from flower_apps import CONFIG  # needs Flower, without which these tests are skipped

    folder = tmp_path_factory.mktemp("app")
    (folder / "config.py").write_text(CONFIG)
    return folder


@pytest.fixture
def folder(app_folder, x64, monkeypatch):
    """The app's folder, where the tiny data are known."""
    runs.install(monkeypatch)
    with jax.numpy_dtype_promotion("standard"):  # what draws samples counts in 32 bits
        yield app_folder
