"""A pytest plug-in that selects the tests in float64, which use the fixture `x64`."""

from typing import Any


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselects all tests without the fixture `x64`."""
    kept = [item for item in items if "x64" in item.fixturenames]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
