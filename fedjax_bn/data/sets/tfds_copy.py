"""Copies of datasets that tensorflow-datasets has prepared: finding, making and opening them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedjax_bn.arguments.text import brief
from fedjax_bn.data.regular_files import read_regular

_PREPARE = """
import sys, tensorflow_datasets as tfds
tfds.builder(sys.argv[1], data_dir=sys.argv[2], file_format="array_record").download_and_prepare()
"""


def open_copy(folder: Path, name: str, how: str, download: bool) -> Any:
    """The read-only builder of the newest version of NAME[/CONFIG] in tensorflow-datasets' folder.

    Args:
      folder: its `data_dir`.
      name: of the dataset.
      how: the command that prepares a copy, for the error.
      download: prepare a copy where there is none.

    Raises:
      ModuleNotFoundError: tensorflow-datasets is not installed.
      FileNotFoundError: there is no prepared copy, and none could be made.
      ValueError: it is not in the format array_record, or names code of others, which
        tensorflow-datasets would import.
    """
    try:
        import tensorflow_datasets as tfds
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {name} of tensorflow-datasets needs {error.name}; install fedjax_bn with its "
            "data extra (pip install tensorflow-datasets importlib_resources array_record)"
        ) from error
    if not _versions(folder / name):
        if not download:
            raise FileNotFoundError(f"{folder / name} has no prepared copy; {how}")
        _prepare(folder, name, how)
    newest = _versions(folder / name)[-1]
    _check_features(newest / "features.json")
    builder = tfds.builder_from_directory(newest)
    formats = sorted(form.value for form in builder.info.available_file_formats())
    if "array_record" not in formats:
        raise ValueError(
            f"{builder.data_dir} is in the format {', '.join(formats)}, which takes TensorFlow to "
            f"read; move it away and prepare it again: {how}"
        )
    return builder


def _check_features(path: Path) -> None:
    """Raises ValueError unless all classes that a copy names are of tensorflow-datasets."""
    try:
        named = set(_classes(json.loads(read_regular(path, 2**26))))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot read {path} ({brief(str(error))}): prepare it again") from error
    if foreign := sorted(one for one in named if not one.startswith("tensorflow_datasets.")):
        raise ValueError(
            f"{path} names the code {brief(foreign[0])}, which is not imported: take a copy that "
            "has features of tensorflow-datasets alone"
        )


def _classes(content: Any) -> Iterator[str]:
    """The names of classes in the content of a features.json, of its present and its old form."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if key in ("type", "pythonClassName", "python_class_name"):
            yield str(value)
        elif isinstance(value, dict | list):
            yield from _classes(value)


def _versions(folder: Path) -> list[Path]:
    """The versions in a dataset's folder, the newest last."""
    ready = [info.parent for info in folder.glob("*.*.*/dataset_info.json")]
    ready = [version for version in ready if version.name.replace(".", "").isdecimal()]
    return sorted(ready, key=lambda version: tuple(map(int, version.name.split("."))))


def _prepare(folder: Path, name: str, how: str) -> None:
    # in a process of its own, since the builders import TensorFlow
    done = subprocess.run(
        [sys.executable, "-c", _PREPARE, name, str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise FileNotFoundError(
            f"{folder / name} has no prepared copy, and making one failed "
            f"({lines[-1].strip() if lines else done.returncode}); prepare it elsewhere and bring "
            f"it here: {how}"
        )
