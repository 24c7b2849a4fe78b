"""Prepares a copy of a dataset: python -m fedjax_bn.tfds NAME FOLDER [--data_dir=DIR]."""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 after an error message on stderr."""
    try:
        import tensorflow_datasets as tfds

        from fedjax_bn.tfds.builders import BUILDERS
    except ModuleNotFoundError as error:
        print(f"this needs {error.name}: install fedjax_bn with its data extra", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(prog="python -m fedjax_bn.tfds", description=__doc__)
    parser.add_argument("name", choices=sorted(BUILDERS))
    parser.add_argument("folder", help="the folder of the images, as its authors publish it")
    parser.add_argument("--data_dir", help="folder of prepared copies (~/tensorflow_datasets)")
    given = parser.parse_args(arguments)
    try:
        builder = BUILDERS[given.name](data_dir=given.data_dir)
        where = tfds.download.DownloadConfig(manual_dir=given.folder)
        builder.download_and_prepare(download_config=where)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(builder.data_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
