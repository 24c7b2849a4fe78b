import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """The benchmarks' folder, which Python puts first on the path when a script runs."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return FOLDER
