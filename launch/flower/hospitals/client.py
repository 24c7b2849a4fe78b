"""Defines the app that a SuperNode runs."""

from pathlib import Path

from fedjax_bn.flower import client_app

app = client_app(Path(__file__).parents[1])
