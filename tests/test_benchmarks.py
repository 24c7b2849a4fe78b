"""Benchmarks are run by hand; here only that they still fit the library."""

import runpy
import sys
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parents[1].glob("benchmarks/*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_benchmark_imports_only_what_is_there(file, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # benchmarks add to it
    assert "main" in runpy.run_path(str(file), run_name="benchmark")
