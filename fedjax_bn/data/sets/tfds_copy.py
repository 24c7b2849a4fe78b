"""Copies of datasets that tensorflow-datasets has prepared: finding, making and opening them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

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
      ValueError: it is not in the format array_record.
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
    builder = tfds.builder_from_directory(_versions(folder / name)[-1])
    formats = sorted(form.value for form in builder.info.available_file_formats())
    if "array_record" not in formats:
        raise ValueError(
            f"{builder.data_dir} is in the format {', '.join(formats)}, which takes TensorFlow to "
            f"read; move it away and prepare it again: {how}"
        )
    return builder


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
