"""Reads datasets: `load` of each module returns a `Source` or a `Dataset`.

A reader raises FileNotFoundError for missing files, with their layout and where to get them;
ValueError for an unsuitable argument or files, naming up to ten; ModuleNotFoundError if it needs an
extra package; and OSError if its cache cannot be written.
"""
