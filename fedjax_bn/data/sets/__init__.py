"""Reads datasets: `load_NAME` of each module returns a `Source` or a `Dataset`.

A reader raises FileNotFoundError for missing files, with their layout and where to get them;
ValueError for an unsuitable argument, or a damaged file, with its whole path and the library's own
reason; ModuleNotFoundError if it needs an extra package; and OSError if its cache cannot be
written.
"""
