"""Defines the app that the SuperLink runs."""

from pathlib import Path

from fedjax_bn.flower import server_app

app = server_app(Path(__file__).parents[1])
