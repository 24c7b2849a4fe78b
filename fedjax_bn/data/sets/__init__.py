"""Reads datasets: `load_NAME` of each module returns a `Source` or a `Dataset`.

A reader raises FileNotFoundError for missing files, with their layout and where to get them, and
ValueError for an unsuitable argument, or a damaged file, with its path and the library's reason.
"""
