"""Puts the launchers and sweeps on Python's path, after all packages: PyPI has a `coverage` too."""

import sys
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"
sys.path += [str(LAUNCH), str(LAUNCH / "sweeps"), str(LAUNCH / "convert")]
