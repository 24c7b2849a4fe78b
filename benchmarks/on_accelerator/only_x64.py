"""A plug-in of pytest that keeps the tests in float64: those that ask for the fixture `x64`."""

from typing import Any


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselects all others."""
    kept = [item for item in items if "x64" in item.fixturenames]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
